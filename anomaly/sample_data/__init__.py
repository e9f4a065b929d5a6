"""A generated data set in MVTec AD's layout, to try the program on without downloading anything."""

from anomaly.sample_data.products import DEFECT_TYPES, PRODUCTS, write_sample_data

__all__ = ["DEFECT_TYPES", "PRODUCTS", "write_sample_data"]
