"""Patch embeddings -> patch scores: a module or folder a method, behind the protocols in `base`."""
