"""The parts of families.py: what each library has, built small, and what is checked."""
