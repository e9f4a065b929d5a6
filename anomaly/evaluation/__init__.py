"""Detector x images with labels -> figures."""
