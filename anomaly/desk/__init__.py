"""Before and after the model: data sets checked, settings and thresholds chosen, advice."""
