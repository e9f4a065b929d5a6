"""Lists, of one's own or exported by other products: what their rows say an image is."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anomaly.datasets.by_names import CLEAR, check_good, plain
from anomaly.datasets.labels import Label, label_of, meant_by
from anomaly.datasets.samples import GOOD, SPLITS, Dataset, Sample, in_splits
from anomaly.errors import DataError, nearest, some
from anomaly.files.outputs import left_by_system
from anomaly.files.tables import Rows, read_rows
from anomaly.files.writing import like
from anomaly.imaging.listing import list_images

log = logging.getLogger(__name__)

# Columns and splits of a list of one's own.
COLUMNS = ("path", "label", "mask", "split", "group")
_VISA_LIST = Path("split_csv") / "1cls.csv"
_COCO = "_annotations.coco.json"
_COCO_SPLITS = {
    "": "",
    "train": "train",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}
_NO_PATH = {"", ".", ".."}


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


def open_list(file: Path) -> Dataset:
    """A CSV file with a header: `path`, and where there are any `label, mask, split, group`.

    Or a manifest of SageMaker, which has paths and labels.

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
    numbers = False
    for line, row in _rows(file, COLUMNS, ("path",)):
        where = f"{file} line {line}"
        others = () if "label" in row else sorted(row.keys() - {*COLUMNS})
        for name in others:
            if {label_of(name), label_of(row[name])} & CLEAR:
                raise DataError(
                    f"{where}: there is no column label, but {name} ({row[name]!r}) seems to say "
                    "which images are good; rename that column to `label`, or remove it"
                )
        if not seen and others:
            log.warning(
                "%s has no column `label`, so all its images count as good; if %s says which are "
                "good, rename that column to `label`",
                file,
                " or ".join(others),
            )
        if not row["path"].strip():
            raise DataError(f"{where} has no path; fill it in or remove the line")
        sample = _sample(row, file.parent, where)
        if (name := sample.name) in seen:  # `a.png` and `./a.png` are one image
            raise DataError(f"{where} repeats {name} of line {seen[name]}; remove one of them")
        seen[name] = line
        numbers |= row.get("label", "").strip().isdecimal()
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
        label_them = "give the list a column label, with `good` or a kind of defect in each row"
        paths = [sample.path for _, sample in samples]
        check_good(paths, Path(os.path.commonpath(folders)), lambda bad: label_them)
    if numbers:
        log.info("%s: label 0 counts as good, other numbers as defects", file)
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
    if data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return _manifest_rows(data, file)
    return read_rows(data, str(file), columns, needed or columns)


def annotations_in(folder: Path) -> tuple[str, Path, str] | None:
    """The format, the root and, for people, the name of what says what a folder's images show."""
    if _coco_files(folder):
        return "coco", folder, "annotations in COCO's form, as Roboflow exports them"
    lists = [p for p in sorted(folder.glob("*.manifest")) if not left_by_system(p.name)]
    if len(lists) > 1:
        names = ", ".join(p.name for p in lists)
        raise DataError(f"{folder} holds several lists of images: {names}; give one of them")
    return ("csv", lists[0], f"a list of images, {lists[0].name}") if lists else None


def _manifest_rows(data: bytes, file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a SageMaker Ground Truth manifest, as Lookout for Vision has them, with their lines.

    Images in S3 are looked for below the folder of the manifest, by their names. Masks aren't read:
    their background is white.

    Raises:
        DataError: a line names no image or class, or an image that isn't there.
    """
    by_name: dict[str, list[Path]] = {}
    for image in list_images(file.parent):
        by_name.setdefault(image.name, []).append(image)
    for number, line in enumerate(data.decode("utf-8-sig", "replace").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        entry = _parsed(line, where)
        source = entry.get("source-ref") if isinstance(entry, dict) else None
        if not isinstance(source, str):
            raise DataError(f"{where} has no source-ref, which names the image")
        about = [v for k, v in entry.items() if k.endswith("-metadata") and isinstance(v, dict)]
        classes = {str(v["class-name"]) for v in about if v.get("class-name")}
        if len(classes) != 1:
            raise DataError(
                f"{where} has {len(classes)} class names, but needs exactly one (e.g. in the "
                "metadata of anomaly-label); correct the line, or remove it"
            )
        yield number, {"path": _beside(source, file.parent, by_name, where), "label": classes.pop()}


def _beside(source: str, folder: Path, by_name: dict[str, list[Path]], where: str) -> str:
    """The file that an address in S3 stands for: the one that has most of its path."""
    if "://" not in source:
        return source
    parts = source.split("/")[::-1]

    def alike(image: Path) -> int:
        pairs = zip(image.parts[::-1], parts, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(parts))

    found = sorted(by_name.get(parts[0], ()), key=alike)
    if not found:
        raise DataError(
            f"{where}: {source} isn't below the folder of the list; copy the images there, e.g. "
            "with `aws s3 sync`"
        )
    if len(found) > 1 and alike(found[-1]) == alike(found[-2]):
        raise DataError(
            f"{where}: {source} can be {found[-2]} or {found[-1]}; copy the images there with "
            "their folders"
        )
    return found[-1].relative_to(folder).as_posix()


def open_coco(folder: Path) -> Dataset:
    """Images with annotations in COCO's form, as Roboflow exports them.

    An image with an annotation shows a defect of that category, unless its name says good; one
    without is good.

    Raises:
        DataError: no annotations are there, or they aren't in that form.
    """
    files = _coco_files(folder)
    if not files:
        raise DataError(
            f"neither {folder} nor train/ in it has {_COCO}; give the folder that has it"
        )
    found = [(split, s) for split, file in files for s in _annotated(file, folder)]
    good = sum(not sample.is_defect for _, sample in found)
    log.info("%s: %d images without an annotation of a defect are good", folder, good)
    samples = [(split and "test" if s.is_defect else split, s) for split, s in found]
    return in_splits(folder, samples, "Images without annotations are the good ones.")


def _coco_files(folder: Path) -> list[tuple[str, Path]]:
    files = [(split, folder / name / _COCO) for name, split in _COCO_SPLITS.items()]
    return [(split, file) for split, file in files if file.is_file()]


def _annotated(file: Path, folder: Path) -> list[Sample]:
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} can't be read ({error})") from None
    content = _parsed(text, str(file))
    try:
        categories = {each["id"]: str(each["name"]) for each in content["categories"]}
        kinds: dict[Any, set[str]] = {}
        for each in content["annotations"]:
            kinds.setdefault(each["image_id"], set()).add(categories[each["category_id"]])
        images = [(str(each["file_name"]), kinds.get(each["id"], ())) for each in content["images"]]
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{file} isn't in COCO's form: images, annotations, categories") from None
    samples = []
    for name, own in images:
        path = file.parent / name
        if not _NO_PATH.isdisjoint(name.split("/")):
            raise DataError(f"{file}: {name!r} can't be the name of an image")
        meant = sorted({meant_by(kind, str(file)) for kind in own} - {GOOD})
        kind = meant[0] if meant else GOOD
        samples.append(Sample(path, path.relative_to(folder).as_posix(), kind))
    return samples


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{where} isn't JSON") from None
