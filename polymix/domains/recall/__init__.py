"""Associative recall and copying: what a language model can keep of its past, and how it learns to."""
