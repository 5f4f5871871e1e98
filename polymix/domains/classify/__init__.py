"""Images and their classes: a vision transformer or a host of timm with any mixer, accuracy."""
