"""Good images -> a model and its thresholds; updates and merges of models."""
