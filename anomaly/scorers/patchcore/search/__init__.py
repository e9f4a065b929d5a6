"""Nearest vectors of a memory bank. An index is derived from the bank, never saved with a model."""
