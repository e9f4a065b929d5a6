"""Visual inspection that learns what good looks like and marks what isn't."""

__version__ = "0.1.0"
