"""Processes on many machines, any of which may die: on Ray, and what is given to them."""
