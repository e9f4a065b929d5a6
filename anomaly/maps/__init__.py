"""Patch scores -> anomaly maps, heatmaps, marked regions and map files. Imports no torch."""
