"""Learn, keep, ask: good images -> a detector -> a model folder, and predictions."""
