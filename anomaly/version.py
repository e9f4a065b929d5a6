"""The version: of the package, and in what it writes."""

__version__ = "0.1.0"
