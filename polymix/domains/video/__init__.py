"""Video: the class of a clip, or its next frame, by transformers that may read frame after frame."""
