"""Lists, of one's own or VisA's: what their rows say an image is."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from anomaly.datasets.names import CLEAR, Label, check_names, label_of, meant_by, plain
from anomaly.datasets.samples import GOOD, SPLITS, Dataset, Sample, in_splits
from anomaly.errors import DataError, nearest, some
from anomaly.files.tables import Rows, csv_text, read_rows
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
    rows = list(_rows(file, COLUMNS, ("path",)))
    columns = {column for _, row in rows for column in row}
    if others := "label" not in columns and sorted(columns - {*COLUMNS, ""}):
        raise DataError(
            f"{file} has no column `label`, but {' and '.join(others)}: if one says which "
            "images are good, rename it to `label`, else remove it"
        )
    samples = sorted(_samples(rows, file, file.parent), key=lambda entry: entry[1].name)
    if not any(row.get("label", "").strip() for _, row in rows):
        paths = [sample.path for _, sample in samples]
        folders = [plain(path.parent) for path in paths] or [plain(file.parent)]
        check_names(paths, Path(os.path.commonpath(folders)), Label.GOOD)
    kinds = {s.defect_type for _, s in samples if label_of(s.defect_type) is Label.UNKNOWN}
    if kinds:
        log.info("%s: these labels count as kinds of defect: %s", file, some(sorted(kinds), most=8))
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
    own = [(line, row | {"path": row["image"]}) for line, row in rows if row["object"] == category]
    if not own:
        known = nearest(category, (row["object"] for _, row in rows))
        raise DataError(f"{file} lists no category {category!r}; {known}")
    hint = f"{file} must list some with the split `train`"
    return in_splits(folder, _samples(own, file, root), hint)


def listing_of(dataset: Dataset, copies: Iterable[Sequence[str]] = ()) -> str:
    """The lines of a list of a data set; marked as UTF-8, so that names that are no text are kept.

    Args:
        dataset: its splits are named, unless they are drawn.
        copies: names of images that show the same: they are views of one part.
    """
    part = {name: f"copies of {names[0]}" for names in copies for name in names}
    rows: list[tuple[object, ...]] = [COLUMNS]
    for split, sample in ((name, s) for name, inside in dataset.splits.items() for s in inside):
        kind = sample.defect_type
        if sample.is_defect:  # `0`, and what somebody has said is one
            kinds = (kind, f"defect {kind}", "defect")
            kind = next(k for k in kinds if label_of(k) is Label.DEFECTIVE)
        mask = None if sample.mask_path is None else str(sample.mask_path)
        group = sample.group or part.get(sample.name)
        rows.append((str(sample.path), kind, mask, None if dataset.drawn else split, group))
    return "\ufeff" + csv_text(rows)


def _samples(
    rows: Iterable[tuple[int, dict[str, str]]], file: Path, folder: Path
) -> list[tuple[str, Sample]]:
    """Splits, empty where none is named, and samples of a list's rows, whose paths are in a folder.

    Raises:
        DataError: a row can't be meant, or some rows have a label and some haven't.
    """
    samples: dict[str, tuple[str, Sample]] = {}
    lines: dict[str, int] = {}
    unlabelled = []
    for line, row in rows:
        where = f"{file} line {line}"
        path, label, mask, split, group = (row.get(column, "").strip() for column in COLUMNS)
        if not path:
            raise DataError(f"{where} has no path; fill it in or remove the line")
        name = Path(named(path, folder)).as_posix()
        if name in samples:  # `a.png` and `./a.png` are one image
            raise DataError(f"{where} repeats {name} of line {lines[name]}; remove one of them")
        kind, mask_path = meant_by(label, where), folder / named(mask, folder) if mask else None
        if split and split not in SPLITS:
            raise DataError(f"{where}: unknown split {split!r}; {nearest(split, SPLITS)}")
        if split in ("train", "validation") and kind != GOOD:
            raise DataError(
                f"{where}: a defect ({kind!r}) in the split {split!r}, which is for good images; "
                "make its split `test`"
            )
        unlabelled += [] if label else [str(line)]
        samples[name] = split, Sample(folder / name, name, kind, mask_path, group or None)
        lines[name] = line
    if unlabelled and len(unlabelled) < len(samples):
        raise DataError(
            f"{file}: {len(unlabelled)} of {len(samples)} rows have no label (lines "
            f"{some(unlabelled)}). Fill in `good` or a kind of defect, or remove these lines"
        )
    return [*samples.values()]


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
