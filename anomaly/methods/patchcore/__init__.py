"""PatchCore (Roth et al. 2022): a memory bank of good patches, and the distance to it."""

ADAPTIVE_DIMENSIONS = 1024  # of embeddings, with `model.embedding: adaptive`
