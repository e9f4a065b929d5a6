"""Model x images with labels -> figures."""
