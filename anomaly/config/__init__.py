"""Settings: their types and defaults, and the files that they come from."""
