"""A generated data set in MVTec AD's layout, to try the program on without downloading anything."""

from anomaly.sample_data.photographs import write_sample_data

__all__ = ["write_sample_data"]
