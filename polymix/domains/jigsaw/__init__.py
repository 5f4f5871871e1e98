"""Pieces of photographs, shuffled: a transformer with any mixer says where each belongs."""
