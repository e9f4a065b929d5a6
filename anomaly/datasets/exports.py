"""Lists that other products export: manifests of Amazon's services, annotations in COCO's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anomaly.datasets.labels import meant_by
from anomaly.datasets.samples import GOOD, Sample
from anomaly.errors import DataError
from anomaly.files.outputs import left_by_system
from anomaly.imaging.listing import list_images

log = logging.getLogger(__name__)

_COCO = "_annotations.coco.json"
_COCO_SPLITS = {
    "": "",
    "train": "train",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}
_NO_PATH = {"", ".", ".."}


def annotations_in(folder: Path) -> tuple[str, Path, str] | None:
    """The format, the root and, for people, the name of what says what a folder's images show."""
    if _coco_files(folder):
        return "coco", folder, "annotations in COCO's form, as Roboflow exports them"
    lists = [p for p in sorted(folder.glob("*.manifest")) if not left_by_system(p.name)]
    if len(lists) > 1:
        names = ", ".join(p.name for p in lists)
        raise DataError(f"{folder} holds several lists of images: {names}; give one of them")
    return ("csv", lists[0], f"a list of images, {lists[0].name}") if lists else None


def manifest_rows(data: bytes, file: Path) -> Iterator[tuple[int, dict[str, str]]]:
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


def coco_samples(folder: Path) -> list[tuple[str, Sample]]:
    """Images with annotations in COCO's form, and the split of each.

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
    samples: list[tuple[str, Sample]] = []
    for split, file in files:
        samples += [(split, sample) for sample in _annotated(file, folder)]
    good = sum(not sample.is_defect for _, sample in samples)
    log.info("%s: %d images without an annotation of a defect are good", folder, good)
    return [(split and "test" if s.is_defect else split, s) for split, s in samples]


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
