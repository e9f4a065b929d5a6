"""Evaluations and runs -> pages and tables that people read."""
