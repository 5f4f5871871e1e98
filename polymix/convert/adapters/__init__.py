"""Adapters for the attention classes of each library. They are imported when a model of that library is first seen."""
