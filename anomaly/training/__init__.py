"""Good images -> a model and its thresholds; updates of models."""
