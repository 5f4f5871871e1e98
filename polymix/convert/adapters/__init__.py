"""One file a library, loaded when a model of that library is first looked at."""
