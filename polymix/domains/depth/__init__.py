"""Depth: how far away every pixel is, seen by one camera or by several of one scene."""
