"""What `infer` is to score: files, folders of them, lists."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anomaly.datasets.lists import COLUMNS, exists, named
from anomaly.datasets.names import Label, check_annotations, check_names, plain
from anomaly.datasets.samples import GOOD, Sample, without_masks
from anomaly.errors import DataError, some
from anomaly.files.tables import SEPARATOR, header_of, read_rows, texts_of
from anomaly.files.writing import left_by_system, looked_in, short_name
from anomaly.imaging.read import is_folder, is_image, list_files

log = logging.getLogger(__name__)

_COLUMNS = ("path", "group")


_OURS = (".png", ".tiff")  # suffixes of our pictures


@dataclass(frozen=True)
class Found:
    """What is to be scored.

    Attributes:
        paths: the image files, each once, in order of their names.
        groups: the part that an image shows, by its path; those that a list says nothing of are
            missing.
        passed_over: a line on the folders' other files; empty without any.
    """

    paths: list[Path]
    groups: dict[str, str]
    passed_over: str = ""

    @property
    def sha256(self) -> str:
        """What tells one list of files, and the parts that they show, from another."""
        listed = [f"{path}\0{self.groups.get(str(path), '')}" for path in self.paths]
        return hashlib.sha256("\0".join(listed).encode("utf-8", "surrogateescape")).hexdigest()


def is_list(given: Path) -> bool:
    """True if an input names images instead of being one: a text or CSV file, or `-`."""
    return str(given) == "-" or given.suffix.lower() in (".txt", ".csv", ".tsv")


def find_inputs(inputs: Sequence[Path], option: str = "--input") -> Found:
    """The image files that are meant.

    Args:
        inputs: files, folders that are searched, and lists: a text file with a path on each line,
            or a CSV file with a header and the columns `path` and `group`, or `path` alone, or a
            `results.csv`; or the list of a data set without groups, whose paths lead from its own
            folder; `-` for standard input. A file that a list names needn't exist, and will be
            reported as unreadable.
        option: where the inputs were given, for messages; lists are read for `--input` alone,
            since others need images whose labels are known.

    Raises:
        DataError: an input or the list doesn't exist or may not be looked at, there is no image at
            all, or the list gives an image no part or two.
    """
    paths, files, groups = set[Path](), list[Path](), dict[str, str]()
    for given in inputs:
        if len(inputs) > 1 and left_by_system(given.name) and not given.name.startswith("."):
            log.warning("skipped, as files of the system: %s", given)
        elif is_folder(given):
            files += list_files(given)
        elif option == "--input" and is_list(given):
            paths.update(_listed(str(given), groups))
        elif given.exists():
            paths.add(given)
        else:
            raise DataError(f"{option} {given} doesn't exist{looked_in(given)}")
    paths.update(filter(is_image, files))
    others = passed_over(files)
    if not paths:
        there = others and f" ({others})"
        raise DataError(f"no images in {', '.join(map(str, inputs))}{there}")
    return Found(sorted(paths), groups, others)


def check_inputs(inputs: Iterable[Path], images: Iterable[Path], *, defects: bool = False) -> None:
    """Refuse files and folders that were given as good, or as defects, where names say otherwise.

    Args:
        inputs: as given.
        images: what was found in them.
        defects: whether they were given as defects; a file that is named as one may lie anywhere.

    Raises:
        DataError: the message names the first such folder, or the files.
    """
    files = list(images)
    # A folder may be given beside files of it.
    given = sorted((is_folder(place), place) for place in inputs)
    for folder, whole in {p if whole else p.parent: whole for whole, p in given}.items():
        inside = [file for file in files if file.is_relative_to(folder)]
        if not defects:
            check_names(inside, folder, Label.GOOD)
            check_annotations(inside, folder)
        elif whole:
            check_names(inside, folder, Label.DEFECTIVE)


def open_test_images(good: Sequence[Path], defects: Sequence[Path]) -> tuple[Sample, ...]:
    """Images to test with, by the folders that hold them.

    Args:
        good: folders of good images.
        defects: folders of defects; a subfolder names their type, else the folder itself.

    Raises:
        DataError: a folder is missing or holds no images, names contradict what its images are
            given as, or an image is given as both.
    """
    samples: dict[Path, Sample] = {}
    root = Path(os.path.commonpath([plain(folder).parent for folder in (*good, *defects)]))
    for option, folders in (("good", good), ("defects", defects)):
        for folder in map(plain, folders):
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
    """A line on the files that aren't images by their names; empty without any."""
    others = sorted({str(file) for file in files if not is_image(file)})
    if not others:
        return ""
    count = "1 file is" if len(others) == 1 else f"{len(others)} files are"
    suffixes = ".png, .jpg, .bmp, .tif, .webp …"
    return f"{count} skipped, without an image suffix ({suffixes}): {some(others)}"


def _listed(list_file: str, groups: dict[str, str]) -> list[Path]:
    """The images that a list names; the part of each, where it says that, goes into `groups`."""
    name = f"--input {list_file}"
    try:
        data = sys.stdin.buffer.read() if list_file == "-" else Path(list_file).read_bytes()
    except OSError as error:
        raise DataError(f"{name} can't be read: {error.strerror}") from None
    readings = texts_of(data)
    if len(readings) > 1:  # file names are bytes: they stay, unless a code page fits better
        readings.insert(0, os.fsdecode(data))
    texts = [[line for line in re.split(r"[\r\n]+", text) if line.strip()] for text in readings]
    lines = max(texts, key=lambda lines: sum(map(exists, lines)))
    if lines and SEPARATOR.match(lines[0]):
        lines = lines[1:]
    header, _ = header_of(lines[0], _COLUMNS) if lines else ([], "")
    is_path = len(header) < 2 and is_image(Path(*header))
    of_table = header and not is_path and Path(list_file).suffix.lower() in (".csv", ".tsv")
    if not (of_table or {*header} & {*_COLUMNS}):
        return [Path(named(line)) for line in lines]
    # Without groups are the paths of a results.csv, and those of a data set's list.
    of_results = "image_sha256" in header
    grouped = not of_results and not {*header} <= {*COLUMNS, ""} - {"group"}
    from_list = not (grouped or of_results or len(header) == 1 or list_file == "-")
    folder = Path(list_file).parent if from_list else Path()
    paths: list[Path] = []
    needed = _COLUMNS if grouped else ("path",)
    for line, row in read_rows(data, name, _COLUMNS, needed, lambda r: exists(r["path"], folder)):
        path = folder / named(row["path"], folder)
        if grouped and not (row["path"] and row["group"]):
            raise DataError(f"{name}, line {line}: path and group mustn't be empty")
        if grouped and (group := groups.setdefault(str(path), row["group"])) != row["group"]:
            raise DataError(
                f"{name}, line {line}: {path} is in group {row['group']!r} here and in {group!r} "
                "above; an image shows one part"
            )
        paths += [path] if row["path"] else []
    return paths


def picture_names(
    paths: Sequence[Path],
    inputs: Sequence[Path],
    exists: Callable[[str], bool] = lambda name: False,
    numbers: dict[str, int] | None = None,
) -> list[str]:
    """A heatmap's path for each image, mirroring the inputs' folders; no two are equal.

    Names that are too long for a file system once they have a suffix are shortened. A folder whose
    name ends like a picture's has a `~` behind it: `x.jpg.png/` is beside `x.jpg`.

    Args:
        paths: the image files.
        inputs: the files and folders that they were found through; none stands for the files
            themselves.
        exists: whether a name is taken by a picture already.
        numbers: how often names were given again in earlier calls, kept up to date here: where one
            is given a thousand times, nobody has to ask for all the earlier ones.
    """
    numbers = {} if numbers is None else numbers
    folders = [plain(p) if os.path.isdir(p) else plain(p).parent for p in inputs]  # noqa: PTH112, never raises
    common = os.path.commonpath(folders or [plain(p).parent for p in paths])
    names: dict[str, str] = {}  # by what is one name on Windows and macOS
    for path in paths:
        mirrored = plain(path).relative_to(common)
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
