"""Patch embeddings -> patch scores: a module or folder for each method, behind the protocols in `base`."""
