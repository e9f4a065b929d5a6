"""Evaluations -> files and tables that people read."""
