"""PatchCore (Roth et al. 2022): a memory bank of good patches, and the distance to it."""
