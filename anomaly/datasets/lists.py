"""Data sets whose list says what an image is: a CSV file of one's own, or VisA's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from anomaly.datasets.folders import GOOD_WORDS
from anomaly.datasets.samples import GOOD, Dataset, Sample, no_training_images, set_apart
from anomaly.errors import DataError, nearest
from anomaly.files.tables import Rows, read_rows
from anomaly.files.writing import like

log = logging.getLogger(__name__)

COLUMNS = ("path", "label", "mask", "split", "group")
_GOOD_LABELS = GOOD_WORDS | {"", "0"}
_SPLITS = ("train", "validation", "test")
_VISA_LIST = Path("split_csv") / "1cls.csv"


def open_list(file: Path) -> Dataset:
    """A CSV file with a header: `path`, and where there are any `label, mask, split, group`.

    Paths are taken from the list's own folder. A label is `good` (or another of `GOOD_WORDS`, `0`
    or nothing) or a kind of defect. Without a column `split`, good images are learned from, but for
    a fifth that is tested with, like all defects; views of one part stay together. The order of
    the lines changes nothing: images are taken in the order of their paths, as from a folder.

    Raises:
        DataError: no such list, or a row that can't be meant; the message names the line.
    """
    samples: list[tuple[str, Sample]] = []
    seen: dict[str, int] = {}
    for line, row in _rows(file, COLUMNS, ("path",)):
        if not seen and "label" not in row and (others := sorted(row.keys() - {*COLUMNS})):
            log.warning(
                "%s has no column label, so all its images are taken for good; does %s say which "
                "are?",
                file,
                " or ".join(others),
            )
        where = f"{file} line {line}"
        if not row["path"].strip():
            raise DataError(f"{where} has no path; fill it in or remove the line")
        sample = _sample(row, file.parent)
        if (name := sample.name) in seen:  # `a.png` and `./a.png` are one image
            raise DataError(f"{where} repeats {name} of line {seen[name]}; remove one of them")
        seen[name] = line
        samples.append((_split_of(row, where), sample))
    samples.sort(key=lambda entry: entry[1].name)
    train, validation, test = ([s for n, s in samples if n == split] for split in _SPLITS)
    undecided = [s for n, s in samples if not n]
    # Of a part with a defect all views are tested with, and so are those of a part that is tested.
    parts = {s.group for s in [*test, *(s for s in undecided if s.is_defect)]} - {None}
    test += [s for s in undecided if not s.is_defect and s.group in parts]
    learned, tested = set_apart(s for s in undecided if not s.is_defect and s.group not in parts)
    train += learned
    test += [*tested, *(s for s in undecided if s.is_defect)]
    return _dataset(file, train, test, validation)


def open_visa(folder: Path) -> Dataset:
    """A category of VisA, in the one-class split: `split_csv/1cls.csv` beside the categories.

    Raises:
        DataError: no such list, or none of its rows is of this category.
    """
    root, category = folder.parent, folder.name
    file = root / _VISA_LIST
    rows = list(_rows(file, ("object", "split", "label", "image", "mask")))
    mine = [row for _, row in rows if row["object"] == category]
    if not mine:
        known = nearest(category, (row["object"] for _, row in rows))
        raise DataError(f"{file} lists no category {category!r}; {known}")
    splits: dict[str, list[Sample]] = {"train": [], "test": []}
    for row in mine:
        defect_type = GOOD if row["label"] == "normal" else row["label"]
        mask = root / row["mask"] if row["mask"] else None
        sample = Sample(root / row["image"], row["image"], defect_type, mask)
        splits.setdefault(row["split"], []).append(sample)
    return _dataset(folder, splits["train"], splits["test"], [])


def _dataset(
    where: Path, train: Sequence[Sample], test: Sequence[Sample], validation: Sequence[Sample]
) -> Dataset:
    if not train:
        raise no_training_images(
            where,
            "A list needs good images with the split `train`; good ones have the label "
            f"{', '.join(sorted(GOOD_WORDS))}, 0 or none",
        )
    return Dataset(where, tuple(train), tuple(test), tuple(validation))


def _sample(row: dict[str, str], folder: Path) -> Sample:
    path, mask = row["path"].strip(), row.get("mask", "").strip()
    return Sample(
        path=folder / path,
        name=Path(path).as_posix(),
        defect_type=_label(row),
        mask_path=folder / mask if mask else None,
        group=row.get("group", "").strip() or None,
    )


def _label(row: dict[str, str]) -> str:
    return meant_by(row.get("label", ""))


def meant_by(label: str) -> str:
    """What a label in a list says that an image is: `good`, or a kind of defect."""
    label = label.strip()
    if label.lower() in _GOOD_LABELS:
        return GOOD
    return "defect" if label == "1" else label


def _split_of(row: dict[str, str], where: str) -> str:
    """The split that a row names; empty where it names none."""
    split = row.get("split", "").strip()
    if split and split not in _SPLITS:
        raise DataError(f"{where}: unknown split {split!r}; {nearest(split, _SPLITS)}")
    if split in ("train", "validation") and _label(row) != GOOD:
        raise DataError(
            f"{where}: a defect ({_label(row)!r}) in the split {split!r}, which is for good "
            "images; make its split `test`"
        )
    return split


def _rows(file: Path, columns: Sequence[str], needed: Sequence[str] = ()) -> Rows:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no list {file}{like(file)}; correct data.root") from None
    except OSError as error:
        raise DataError(f"{file} can't be read ({error.strerror})") from None
    return read_rows(data, str(file), columns, needed or columns)
