"""Settings: types, defaults, methods, and the files that they come from."""
