"""Crops from series of satellite images: PASTIS and synthetic fields, TSViT with any mixer, mIoU."""
