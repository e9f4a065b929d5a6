"""The commands of the sample data."""
