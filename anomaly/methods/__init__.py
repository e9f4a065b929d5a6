"""Patch embeddings -> patch scores: a folder for each method, behind the protocol in `base`."""
