"""How small a small model is, in all libraries."""

WIDTH, DEPTH = 32, 2
LARGEST = 60e6  # parameters; a larger model would take minutes
