"""Series in time: a transformer with any mixer forecasts them, with a band."""
