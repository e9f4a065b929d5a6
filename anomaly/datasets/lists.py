"""Lists, of one's own or VisA's: what their rows say an image is."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from anomaly.datasets.names import CLEAR, Label, check_names, label_of, meant_by, plain
from anomaly.datasets.samples import SPLITS, Dataset, Sample, in_splits
from anomaly.errors import DataError, nearest, some
from anomaly.files.tables import Rows, read_rows
from anomaly.files.writing import like

log = logging.getLogger(__name__)

# Columns and splits of a list of one's own.
COLUMNS = ("path", "label", "mask", "split", "group")
_VISA_LIST = Path("split_csv") / "1cls.csv"


def named(entry: str, folder: Path = Path()) -> str:
    """The path that an entry of a list means; backslashes are slashes where only that file exists.

    Args:
        entry: a path, or a URL of one (`file://`).
        folder: that it leads from.
    """
    name = entry.removeprefix("file://")
    slashed = name if os.name == "nt" else name.replace("\\", "/")
    # Of `os.path`, which takes any name: too long, with null characters.
    if slashed == name or os.path.lexists(folder / name):
        return name
    return slashed if os.path.exists(folder / slashed) else name  # noqa: PTH110


def exists(entry: str, folder: Path = Path()) -> bool:
    """True if an entry of a list is the path of a file or folder."""
    return os.path.exists(folder / named(entry, folder))  # noqa: PTH110, takes any name


def open_list(file: Path) -> Dataset:
    """A CSV file with a header: `path`, and where there are any `label, mask, split, group`.

    Paths are taken from the list's own folder. A label is `good` (or another word for it, or `0`)
    or a kind of defect; where no row has one, all are good, unless their folders' names say
    otherwise. Without a column `split`, good images are learned from, but for
    a fifth that is tested with, like all defects; views of one part stay together. The order of
    the lines changes nothing: images are taken in the order of their paths, as from a folder.

    Raises:
        DataError: no such list, or a row that can't be meant; the message names the line.
    """
    samples: list[tuple[str, Sample]] = []
    seen: dict[str, int] = {}
    unlabelled: list[int] = []
    for line, row in _rows(file, COLUMNS, ("path",)):
        where = f"{file} line {line}"
        if others := "label" not in row and sorted(row.keys() - {*COLUMNS, ""}):
            raise DataError(
                f"{file} has no column `label`, but {' and '.join(others)}: if one says which "
                "images are good, rename it to `label`, else remove it"
            )
        if not row["path"].strip():
            raise DataError(f"{where} has no path; fill it in or remove the line")
        sample = _sample(row, file.parent, where)
        if (name := sample.name) in seen:  # `a.png` and `./a.png` are one image
            raise DataError(f"{where} repeats {name} of line {seen[name]}; remove one of them")
        seen[name] = line
        unlabelled += [] if row.get("label", "").strip() else [line]
        samples.append((_split_of(row, sample, where), sample))
    if unlabelled and len(unlabelled) < len(samples):
        raise DataError(
            f"{file}: {len(unlabelled)} of {len(samples)} rows have no label (lines "
            f"{some([str(line) for line in unlabelled])}). Fill in `good` or a kind of defect, or "
            "remove these lines"
        )
    if unlabelled:
        folders = [plain(sample.path.parent) for _, sample in samples]
        paths = [sample.path for _, sample in samples]
        check_names(paths, Path(os.path.commonpath(folders)), Label.GOOD)
    kinds = {s.defect_type for _, s in samples if label_of(s.defect_type) is Label.UNKNOWN}
    if kinds:
        log.info("%s: these labels count as kinds of defect: %s", file, some(sorted(kinds), most=8))
    samples.sort(key=lambda entry: entry[1].name)
    hint = (
        "A list needs good images with the split `train`; their label is good, another word for "
        "it, or 0"
    )
    return in_splits(file, samples, hint)


def open_visa(folder: Path) -> Dataset:
    """A category of VisA, in the one-class split: `split_csv/1cls.csv` beside the categories.

    Raises:
        DataError: no such list, or none of its rows is of this category.
    """
    root, category = folder.parent, folder.name
    file = root / _VISA_LIST
    rows = list(_rows(file, ("object", "split", "label", "image", "mask")))
    own = [(line, row) for line, row in rows if row["object"] == category]
    if not own:
        known = nearest(category, (row["object"] for _, row in rows))
        raise DataError(f"{file} lists no category {category!r}; {known}")
    samples = []
    for line, row in own:
        where = f"{file} line {line}"
        if not row["label"].strip():
            raise DataError(f"{where} has no label; it must be `normal` or `anomaly`")
        mask = root / row["mask"] if row["mask"] else None
        defect_type = meant_by(row["label"], where)
        sample = Sample(root / row["image"], row["image"], defect_type, mask)
        samples.append((_split_of(row, sample, where), sample))
    return in_splits(folder, samples, f"{file} must list some with the split `train`")


def _sample(row: dict[str, str], folder: Path, where: str) -> Sample:
    path, mask = (named(row.get(name, "").strip(), folder) for name in ("path", "mask"))
    return Sample(
        path=folder / path,
        name=Path(path).as_posix(),
        defect_type=meant_by(row.get("label", ""), where),
        mask_path=folder / mask if mask else None,
        group=row.get("group", "").strip() or None,
    )


def _split_of(row: dict[str, str], sample: Sample, where: str) -> str:
    """The split that a row names; empty where it names none."""
    split = row.get("split", "").strip()
    if split and split not in SPLITS:
        raise DataError(f"{where}: unknown split {split!r}; {nearest(split, SPLITS)}")
    if split in ("train", "validation") and sample.is_defect:
        raise DataError(
            f"{where}: a defect ({sample.defect_type!r}) in the split {split!r}, which is for good "
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

    def worth(row: Mapping[str, str]) -> int:
        return exists(row.get("path", ""), file.parent) + (label_of(row.get("label", "")) in CLEAR)

    return read_rows(data, str(file), columns, needed or columns, worth)
