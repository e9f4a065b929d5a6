"""Subspace: how far a patch is from the principal subspace of good ones."""
