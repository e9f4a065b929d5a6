"""The commands of the line."""
