"""Scorers: what good patches look like, and how far a patch is from that."""
