"""Files, folders and lists that a user names -> images to learn from, test with or score."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anomaly.datasets.names import (
    CLEAR,
    Label,
    absolute,
    check_annotations,
    check_names,
    defect_type_of,
    label_of,
)
from anomaly.datasets.samples import GOOD, SPLITS, Dataset, Sample, in_splits, without_masks
from anomaly.errors import DataError, nearest, some, why
from anomaly.files.tables import SEPARATOR, Rows, csv_text, header_of, read_rows, texts_of
from anomaly.files.writing import left_by_system, like, looked_in, short_name
from anomaly.imaging.read import is_folder, is_image, list_files

log = logging.getLogger(__name__)

# Columns of a data set's list, and of one of images to score.
_LISTED, _SCORED = ("path", "label", "mask", "split", "group"), ("path", "group")
_OURS = (".png", ".tiff")  # suffixes of the pictures that `infer` writes


@dataclass(frozen=True)
class Images:
    """Images to score.

    Attributes:
        paths: the image files, each once, sorted.
        groups: name of the part that an image shows, by the image's path, where a list has it.
        passed_over: a line on the folders' other files; empty without any.
    """

    paths: list[Path]
    groups: dict[str, str]
    passed_over: str = ""

    @property
    def sha256(self) -> str:
        """Hex digest of the paths and of the names of their parts."""
        listed = [f"{path}\0{self.groups.get(str(path), '')}" for path in self.paths]
        return hashlib.sha256("\0".join(listed).encode("utf-8", "surrogateescape")).hexdigest()


def is_list(given: Path) -> bool:
    """True if an input is a list: a text or CSV file, or `-` for standard input."""
    return str(given) == "-" or given.suffix.lower() in (".txt", ".csv", ".tsv")


def find_inputs(inputs: Sequence[Path], option: str = "--input") -> Images:
    """The image files that files, folders and lists name.

    Args:
        inputs: files, folders that are searched, and lists (`-` for standard input): a text file
            with a path on each line; a CSV file with a column `path`, or `path` and `group`; a
            `results.csv`; a data set's list without groups, whose paths lead from its own folder.
            Files that a list names needn't exist.
        option: the option that gave the inputs. Lists are read for `--input` alone, since others
            need images whose labels are known.

    Raises:
        DataError: an input doesn't exist or may not be looked at, there is no image at all, or a
            list is mistaken or gives an image no part or two.
    """
    paths, files, groups = set[Path](), list[Path](), dict[str, str]()
    for given in inputs:
        # A shell's `*` names the system's files, too, but no hidden ones: a user wants those.
        if len(inputs) > 1 and left_by_system(given.name) and not given.name.startswith("."):
            log.warning("skipped, as files of the system: %s", given)
        elif is_folder(given):
            files += list_files(given)
        elif option == "--input" and is_list(given):
            paths.update(_listed(given, groups))
        elif given.exists():
            paths.add(given)
        else:
            raise DataError(f"{option} {given} doesn't exist{looked_in(given)}")
    paths.update(filter(is_image, files))
    others = passed_over(files)
    if not paths:
        hint = others and f" ({others})"
        raise DataError(f"no images in {', '.join(map(str, inputs))}{hint}")
    return Images(sorted(paths), groups, others)


def check_inputs(inputs: Iterable[Path], images: Sequence[Path], *, defects: bool = False) -> None:
    """Refuse inputs given as good, or as defects, whose names or annotations contradict that.

    For defects, only names count: those of given folders, and of folders and files in them.
    """
    # A folder may be given beside some of its files; sorting makes it count as given whole.
    given = sorted((is_folder(place), place) for place in inputs)
    folders = {place if whole else place.parent: whole for whole, place in given}
    for folder, whole in folders.items():
        inside = [image for image in images if image.is_relative_to(folder)]
        if not defects:
            check_names(inside, folder, Label.GOOD)
            check_annotations(inside, folder)
        elif whole:
            check_names(inside, folder, Label.DEFECTIVE)


def open_test_images(good: Sequence[Path], defects: Sequence[Path]) -> tuple[Sample, ...]:
    """Images to test with, from folders of good images and of defects.

    A subfolder names its defects' type, else the folder itself.

    Raises:
        DataError: a folder is missing or holds no images, names contradict its images' type, or an
            image is given with two types (`good` is one).
    """
    samples: dict[Path, Sample] = {}
    root = Path(os.path.commonpath([absolute(folder).parent for folder in (*good, *defects)]))
    for option, folders in (("good", good), ("defects", defects)):
        for folder in map(absolute, folders):
            paths = find_inputs([folder], option=f"--{option}").paths
            check_inputs([folder], paths, defects=option == "defects")
            for path in without_masks(paths):
                below = path.relative_to(folder).parts[:-1]
                kind = below[0] if below else folder.name
                name = path.relative_to(root).as_posix()
                sample = Sample(path, name, GOOD if option == "good" else kind)
                if samples.setdefault(path, sample) != sample:
                    raise DataError(f"{path} is given as good and as a defect; give it once")
    return tuple(samples.values())


def passed_over(files: Iterable[Path]) -> str:
    """A line that counts files without an image's suffix; empty without any."""
    others = sorted({str(file) for file in files if not is_image(file)})
    if not others:
        return ""
    count = "1 file is" if len(others) == 1 else f"{len(others)} files are"
    suffixes = ".png, .jpg, .bmp, .tif, .webp …"
    return f"{count} skipped, without an image suffix ({suffixes}): {some(others)}"


def open_list(file: Path) -> Dataset:
    """The data set of a CSV list: a header `path`, and maybe `label, mask, split, group`.

    Paths start from the list's own folder. A label is `good` (or another word for it, or `0`) or a
    kind of defect; where no row has one, all images are good, unless names contradict that, which
    is refused. `in_splits` splits images without a split. The lines' order changes nothing.

    Raises:
        DataError: there is no such list, a row is mistaken, or no image trains.
    """
    rows = list(_rows(file, _LISTED, ("path",)))
    columns = {column for _, row in rows for column in row}
    others = sorted(columns - {*_LISTED, ""})
    if others and "label" not in columns:
        raise DataError(
            f"{file} has no column `label`, but {' and '.join(others)}: if one says which "
            "images are good, rename it to `label`, else remove it"
        )
    samples = sorted(_samples(rows, file, file.parent), key=lambda entry: entry[1].name)
    if not any(row.get("label", "").strip() for _, row in rows):
        paths = [sample.path for _, sample in samples]
        folders = [absolute(path.parent) for path in paths] or [absolute(file.parent)]
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
        DataError: no such list, none of its rows is of this category, or one is mistaken.
    """
    root, category = folder.parent, folder.name
    file = root / "split_csv" / "1cls.csv"
    rows = list(_rows(file, ("object", "split", "label", "image", "mask")))
    listed = [(n, row | {"path": row["image"]}) for n, row in rows if row["object"] == category]
    if not listed:
        known = nearest(category, (row["object"] for _, row in rows))
        raise DataError(f"{file} lists no category {category!r}; {known}")
    hint = f"{file} must list some with the split `train`"
    return in_splits(folder, _samples(listed, file, root), hint)


def listing_of(dataset: Dataset, copies: Iterable[Sequence[str]] = ()) -> str:
    """Text of a CSV list of a data set, which `open_list` reads; drawn splits are left out.

    Images that are named in one group of `copies` become views of one part.
    """
    parts = {name: f"copies of {names[0]}" for names in copies for name in names}
    rows: list[tuple[object, ...]] = [_LISTED]
    for split, sample in ((name, s) for name, inside in dataset.splits.items() for s in inside):
        kind = sample.defect_type
        if sample.is_defect:  # a kind such as `0` or `July` has to become a word for defects
            kinds = (kind, f"defect {kind}", "defect")
            kind = next(k for k in kinds if label_of(k) is Label.DEFECTIVE)
        mask = None if sample.mask_path is None else str(sample.mask_path)
        group = sample.group or parts.get(sample.name)
        rows.append((str(sample.path), kind, mask, None if dataset.drawn else split, group))
    return "\ufeff" + csv_text(rows)  # the mark of UTF-8 keeps file names that are no text


def _samples(
    rows: Iterable[tuple[int, dict[str, str]]], file: Path, folder: Path
) -> list[tuple[str, Sample]]:
    """(split or empty, sample) for each (line, row) of a list, whose paths lead from `folder`.

    Mistaken rows are refused, and lists of which only some rows have a label.
    """
    samples: dict[str, tuple[int, str, Sample]] = {}  # line, split and sample by the image's name
    unlabelled: list[str] = []
    for line, row in rows:
        where = f"{file} line {line}"
        path, label, mask, split, group = (row.get(column, "").strip() for column in _LISTED)
        if not path:
            raise DataError(f"{where} has no path; fill it in or remove the line")
        name = Path(_path_of(path, folder)).as_posix()
        if name in samples:  # `a.png` and `./a.png` are one image
            raise DataError(
                f"{where} repeats {name} of line {samples[name][0]}; remove one of them"
            )
        kind = defect_type_of(label, where)
        mask_path = folder / _path_of(mask, folder) if mask else None
        if split and split not in SPLITS:
            raise DataError(f"{where}: unknown split {split!r}; {nearest(split, SPLITS)}")
        if split in ("train", "validation") and kind != GOOD:
            raise DataError(
                f"{where}: a defect ({kind!r}) in the split {split!r}, which is for good images; "
                "make its split `test`"
            )
        if not label:
            unlabelled.append(str(line))
        samples[name] = line, split, Sample(folder / name, name, kind, mask_path, group or None)
    if unlabelled and len(unlabelled) < len(samples):
        raise DataError(
            f"{file}: {len(unlabelled)} of {len(samples)} rows have no label (lines "
            f"{some(unlabelled)}). Fill in `good` or a kind of defect, or remove these lines"
        )
    return [(split, sample) for _, split, sample in samples.values()]


def _rows(file: Path, columns: Sequence[str], needed: Sequence[str] = ()) -> Rows:
    """Rows of a list in the encoding in which most labels are words and most files exist.

    Of the known columns, those `needed` must be there: all if it is empty.
    """

    def worth(row: Mapping[str, str]) -> int:
        labelled = label_of(row.get("label", "")) in CLEAR
        return labelled + _is_there(row.get("path", ""), file.parent)

    return read_rows(_bytes_of(file, str(file)), str(file), columns, needed or columns, worth)


def _bytes_of(file: Path, name: str) -> bytes:
    """The content of a list, or of standard input for `-`; messages call it `name`."""
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise DataError(f"{name} can't be read ({why(error)}){like(file)}") from None


def _listed(file: Path, groups: dict[str, str]) -> list[Path]:
    """Images that a list names; their parts are added to `groups`, by the images' paths."""
    name = f"--input {file}"
    data = _bytes_of(file, name)
    lines = _lines_of(data)
    header, _ = header_of(lines[0], _SCORED) if lines else ([], "")
    # A CSV file may be a text file of paths, and a text file may have a header.
    is_path = len(header) < 2 and is_image(Path(*header))
    is_table = header and not is_path and file.suffix.lower() in (".csv", ".tsv")
    if not (is_table or {*header} & {*_SCORED}):
        return [Path(_path_of(line)) for line in lines]
    # A results.csv and the list of a data set without groups have no groups.
    of_data_set = ({*_LISTED, ""} - {"group"}).issuperset(header)
    grouped = not of_data_set and "image_sha256" not in header
    folder = file.parent if of_data_set and len(header) > 1 else Path()
    needed = _SCORED if grouped else ("path",)
    paths: list[Path] = []
    for line, row in read_rows(data, name, _SCORED, needed, lambda r: _is_there(r["path"], folder)):
        path = folder / _path_of(row["path"], folder)
        if grouped and not (row["path"] and row["group"]):
            raise DataError(f"{name}, line {line}: path and group mustn't be empty")
        if grouped and (group := groups.setdefault(str(path), row["group"])) != row["group"]:
            raise DataError(
                f"{name}, line {line}: {path} is in group {row['group']!r} here and in {group!r} "
                "above; an image shows one part"
            )
        paths += [path] if row["path"] else []
    return paths


def _lines_of(data: bytes) -> list[str]:
    """The lines of a list that aren't blank, in the encoding in which most are files' paths.

    A first line `sep=;` is left out.
    """
    texts = texts_of(data)
    if len(texts) > 1:  # file names are bytes: they stay, unless a code page fits better
        texts.insert(0, os.fsdecode(data))
    readings = [[line for line in re.split(r"[\r\n]+", text) if line.strip()] for text in texts]
    lines = max(readings, key=lambda lines: sum(map(_is_there, lines)))
    return lines[1:] if lines and SEPARATOR.match(lines[0]) else lines


def _path_of(entry: str, folder: Path = Path()) -> str:
    """The path that an entry of a list, or its `file://` URL, means from a folder on.

    Backslashes are slashes where only that file exists.
    """
    name = entry.removeprefix("file://")
    slashed = name if os.name == "nt" else name.replace("\\", "/")
    # `os.path` takes any name, even a too long one, where `Path` raises.
    if slashed == name or os.path.lexists(folder / name):
        return name
    return slashed if os.path.exists(folder / slashed) else name  # noqa: PTH110


def _is_there(entry: str, folder: Path = Path()) -> bool:
    return os.path.exists(folder / _path_of(entry, folder))  # noqa: PTH110, takes any name


def picture_names(
    paths: Sequence[Path],
    inputs: Sequence[Path],
    exists: Callable[[str], bool] = lambda name: False,
    numbers: dict[str, int] | None = None,
) -> list[str]:
    """Relative paths of heatmaps, one for each image, that mirror the inputs' folders.

    That of `x.jpg` is `x.jpg.png`, of `x.png`, `x.png`. No two are equal, even without capitals.
    Long names are shortened. A folder named like a picture gets a `~`, to lie beside a picture.

    Args:
        paths: the image files.
        inputs: files and folders that a user named; empty for the images themselves.
        exists: returns True for the name of a picture that exists.
        numbers: the last number of each name, kept over calls so that none is tried twice.
    """
    numbers = {} if numbers is None else numbers
    folders = [absolute(p) if os.path.isdir(p) else absolute(p).parent for p in inputs]  # noqa: PTH112, never raises
    common = os.path.commonpath(folders or [absolute(p).parent for p in paths])
    names: dict[str, str] = {}  # by the name without capitals: one name on Windows and macOS
    for path in paths:
        mirrored = absolute(path).relative_to(common)
        last = mirrored.stem if mirrored.suffix.lower() == ".png" else mirrored.name
        folder = [f"{p}~" if p.lower().endswith(_OURS) else p for p in mirrored.parts[:-1]]
        start = "/".join(map(short_name, (*folder, last)))
        number = numbers.get(start, 1)
        name = f"{start}.png" if number == 1 else f"{start}~{number}.png"
        while name.casefold() in names or exists(name):
            number = numbers[start] = number + 1
            name = f"{start}~{number}.png"
        names[name.casefold()] = name
    return [*names.values()]
