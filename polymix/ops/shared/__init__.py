"""Functions that several ops share."""
