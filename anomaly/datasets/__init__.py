"""Data sets as samples. Lists files; only `ground_truth` decodes any."""

from __future__ import annotations

from anomaly.datasets.inputs import check_inputs, open_test_images
from anomaly.datasets.layouts import FORMATS, open_dataset
from anomaly.datasets.samples import GOOD, Dataset, Sample, ground_truth

__all__ = [
    "FORMATS",
    "GOOD",
    "Dataset",
    "Sample",
    "check_inputs",
    "ground_truth",
    "open_dataset",
    "open_test_images",
]
