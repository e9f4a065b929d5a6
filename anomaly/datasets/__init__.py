"""Data sets as samples. Lists files; only `ground_truth` decodes any."""

from __future__ import annotations

import logging
from pathlib import Path

from anomaly.datasets.layouts import FORMATS, folders_in, open_test_images
from anomaly.datasets.names import check_annotations, check_inputs
from anomaly.datasets.samples import GOOD, Dataset, Sample, ground_truth
from anomaly.errors import DataError, nearest
from anomaly.files.writing import at_home, looked_in
from anomaly.imaging.read import is_folder

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

log = logging.getLogger(__name__)

HOW_TO_GET_MVTEC = (
    "Get MVTec AD from mvtec.com/company/research/datasets/mvtec-ad (free for non-commercial use), "
    "unpack it, and point data.root at the folder that holds the categories "
    "(--set data.root=/path/to/mvtec_ad). `anomaly demo` makes a data set to try things on."
)


def open_dataset(layout: str, root: str | Path | None, category: str | None = None) -> Dataset:
    """List a data set.

    Args:
        layout: a key of `FORMATS`; docs/own-data.md shows what each looks like.
        root: the folder of the data set, or of its categories; with `csv` it may be the list.
        category: a folder (or list) inside `root`; None for `root` itself.

    Raises:
        DataError: something is missing or may not be looked at, there are no training images, or a
            list has a mistake.
        AnomalyError: the root's `~` stands for nobody's home folder.
    """
    if root is None:
        raise DataError(
            "data.root isn't set: name the folder with your images, "
            "e.g. --set data.root=/path/to/images"
        )
    root = Path(root)
    if layout not in FORMATS:
        raise DataError(f"unknown data.format {layout!r}; {nearest(layout, FORMATS)}")
    place = at_home(root) / (category or "")
    if layout == "csv":
        if is_folder(place):
            raise DataError(f"{place} is a folder; with data.format=csv, data.root names the list")
    elif not is_folder(place):
        raise DataError(_missing(layout, at_home(root), category))
    dataset = FORMATS[layout](place)
    if layout not in ("csv", "visa"):  # which are lists
        good = [s.path for split in dataset.splits.values() for s in split if not s.is_defect]
        check_annotations(good, place)
    log.debug("read as %s: %r", layout, dataset)
    return dataset


def _missing(layout: str, root: Path, category: str | None) -> str:
    if root.is_file():
        return (
            f"data.root {root} is a file, but data.format={layout} needs a folder; for a CSV list "
            f"of images use --set data.format=csv"
        )
    if not is_folder(root):
        text = f"data.root {root} doesn't exist{looked_in(root)}. "
    else:
        known = nearest(str(category), folders_in(root))
        known += "" if known.endswith("?") else "."
        text = f"{root} has no folder {category!r}; {known} "
    return text + HOW_TO_GET_MVTEC if layout == "mvtec" else text + "Correct data.root."
