"""Faces in pictures: RetinaNet with a mixer in its backbone, WIDER FACE and its average precision."""
