"""Layouts: what a data set's folders say an image is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from anomaly.datasets.lists import open_list, open_visa
from anomaly.datasets.masks import Masks, plain, strays
from anomaly.datasets.names import CLEAR, Label, by_file_names, label_of, says_masks, split_of
from anomaly.datasets.refusals import check_files, check_good, check_names, files_in, undecided
from anomaly.datasets.samples import (
    GOOD,
    Dataset,
    Sample,
    in_splits,
    listed,
    set_apart,
)
from anomaly.errors import DataError
from anomaly.files.writing import like
from anomaly.imaging.listing import is_folder, list_images, other_files

log = logging.getLogger(__name__)

_COLOUR = "rgb"  # the folder of each kind that has MVTec 3D AD's images


def folders_in(folder: Path) -> list[str]:
    """Names of the folders in one; none where there is no such folder.

    Raises:
        DataError: it can't be listed.
    """
    if not is_folder(folder):
        return []
    return sorted(entry.name for entry in files_in(folder) if entry.is_dir())


def _good_only(folder: Path) -> Dataset:
    train = listed(folder, folder)
    if not train:
        raise DataError(
            f"no images in {folder}{other_files(folder)}; data.root must hold good images to learn "
            "from"
        )
    paths = [sample.path for sample in train]
    named = by_file_names([path.stem for path in paths])
    if not set(named.values()) >= CLEAR:
        check_names(paths, folder, Label.GOOD)
        return Dataset(folder, tuple(train), ())
    if open_ := [path.name for path in paths if named[path.stem] not in CLEAR]:
        raise undecided(folder, open_, "files")
    good = [s for s in train if named[s.path.stem] is Label.GOOD]
    bad = [replace(s, defect_type="defect") for s in train if s not in good]
    check_names([sample.path for sample in good], folder, Label.GOOD)
    log.info(
        "%s: %d images are good by the names of their files, %d defective",
        folder, len(good), len(bad),
    )  # fmt: skip
    learned, tested = set_apart(good)
    return Dataset(folder, tuple(learned), (*tested, *bad), drawn=True)


def labels_in(folder: Path, *, published: bool = False) -> dict[Path, Label]:
    """Labels of images by the names of the folders that they lie right in.

    Args:
        folder: its own name doesn't count.
        published: it is laid out as MVTec AD: only folders in those of splits count, and in `test`
            an unknown name is a kind of defect.

    Returns:
        By the folder with images, relative to `folder`: unclear where names on the way to it
        contradict each other, aside for masks and for what doesn't count.
    """
    inside = dict.fromkeys(image.parent.relative_to(folder) for image in list_images(folder))
    return {inner: _label_within(inner, published) for inner in inside}


def _label_within(inner: Path, published: bool) -> Label:
    split = _split_within(inner)
    parts = inner.parts[split != "" :]
    if any(label_of(part) is Label.ASIDE and not split_of(part) for part in parts):
        return Label.ASIDE
    if published and not (split and parts):
        return Label.ASIDE
    labels = [label for part in parts if (label := label_of(part)) is not Label.PLACE]
    clear = {*labels} - {Label.UNKNOWN}
    if published and split == "test" and labels and not clear:
        return Label.DEFECTIVE
    if clear == {Label.GOOD} and labels[-1] is Label.UNKNOWN:
        return Label.UNCLEAR
    if len(clear) > 1 or not clear <= CLEAR:
        return Label.UNCLEAR
    return clear.pop() if clear else Label.UNKNOWN


def _split_within(inner: Path) -> str:
    return split_of(inner.parts[0]) if inner.parts else ""


def open_by_names(
    folder: Path, answers: Mapping[Path, Label] | None = None, *, published: bool = False
) -> Dataset:
    """Images by the names of their folders, in these of splits (`train/good`) and without.

    Masks have the same names as their images below a folder of masks, which may be any folder on
    the way to these.

    Args:
        folder: its own name doesn't count.
        answers: what folders hold whose names don't tell, relative to `folder`; those that are
            neither good nor defective are left out.
        published: as in `labels_in`.

    Raises:
        DataError: a folder's name doesn't tell, or there are no good images.
    """
    labels = labels_in(folder, published=published)
    masks = sorted({mask for inner in labels for mask in _masks_in(inner)})
    labels |= answers or {}
    if open_ := [i for i, label in labels.items() if label not in {*CLEAR, Label.ASIDE}]:
        raise undecided(folder, [say_folder(inner) for inner in open_])
    finder = Masks()
    samples: list[tuple[str, Sample]] = []
    for sample in listed(folder, folder, "defect"):
        inner = sample.path.parent.relative_to(folder)
        split = _split_within(inner)
        if labels[inner] is Label.GOOD:
            samples.append((split, replace(sample, defect_type=GOOD)))
        elif labels[inner] is Label.DEFECTIVE:
            around = [folder / place for place in _mask_places(inner, masks)]
            kind = next((p for p in reversed(inner.parts) if p != _COLOUR), "defect")
            mask = finder.of(sample.path, around)
            samples.append((split and "test", replace(sample, defect_type=kind, mask_path=mask)))
    for label in (Label.GOOD, Label.DEFECTIVE):
        alike = [s.path for _, s in samples if s.is_defect == (label is Label.DEFECTIVE)]
        check_files(alike, folder, label)
    left = [file for mask in masks for file in finder.left_in(folder / mask)]
    unused = [
        file
        for file in left
        if Label.GOOD not in map(label_of, file.relative_to(folder).parts[:-1])
    ]
    hint = "Put good images in good/ or train/good, defective ones in defect/ or defect/<type>/."
    return replace(in_splits(folder, samples, hint), unused_masks=tuple(unused))


def _masks_in(inner: Path) -> list[Path]:
    """The topmost folder of masks on the way to one, if there is any."""
    return [p for p in (*reversed(inner.parents), inner) if says_masks(p.name)][:1]


def _mask_places(inner: Path, masks: Sequence[Path]) -> Iterator[Path]:
    """Folders that may hold masks of a folder of defects, with or without those above a kind."""
    for mask in masks:
        if mask.parent in (inner, *inner.parents):
            parts = inner.relative_to(mask.parent).parts
            kinds = Label.DEFECTIVE in map(label_of, parts[:-1])
            yield from (mask.joinpath(*parts[i:]) for i in range(len(parts) + (not kinds)))


def say_folder(inner: Path) -> str:
    """A folder inside another, for people."""
    return inner.as_posix() if inner.parts else "the images outside of folders"


def open_test_images(
    good: Sequence[Path],
    defects: Sequence[Path],
    masks: Path | None = None,
    *,
    tell: bool = False,
) -> tuple[Sample, ...]:
    """Images to test with from folders of good and of defective ones.

    Args:
        good: folders of good images.
        defects: folders of defects; a subfolder names their type, else the folder itself.
        masks: a folder with the defects' masks, under their paths in `defects`, or under these in
            a folder named like the one of `defects`.
        tell: log a warning that names masks of no image.

    Raises:
        DataError: a folder is missing or holds no images, good ones by their folders' names aren't,
            or none of the defects has a mask.
    """
    folders = [*((plain(f), True) for f in good), *((plain(f), False) for f in defects)]
    root = Path(os.path.commonpath([folder.parent for folder, _ in folders]))
    samples: dict[Path, Sample] = {}
    finder = Masks()
    for folder, is_good in folders:
        if not is_folder(folder):
            missing = "is no folder" if folder.exists() else f"doesn't exist{like(folder)}"
            raise DataError(f"{folder} {missing}; give a folder of images to test with")
        inside = listed(folder, root) if is_good else _defects_in(folder, root, masks, finder)
        if not inside:
            raise DataError(f"no images in {folder}; give a folder of images to test with")
        if is_good:
            check_good([sample.path for sample in inside], folder)
        for sample in inside:
            if samples.setdefault(sample.path, sample) != sample:
                raise DataError(f"{sample.path} is given as good and as a defect; give it once")
    bad = [sample for sample in samples.values() if sample.is_defect]
    if masks is not None and not any(sample.mask_path for sample in bad):
        wanted = masks / bad[0].defect_type / f"{bad[0].path.stem}.png"
        raise DataError(
            f"none of {len(bad)} defects has a mask in {masks}; name masks like their images, with "
            f"or without _mask at the end (for {bad[0].path}: {wanted})"
        )
    if tell and masks is not None and (unused := strays(finder.left_in(masks))):
        log.warning("%s", unused)
    return tuple(samples.values())


def _defects_in(folder: Path, root: Path, masks: Path | None, finder: Masks) -> list[Sample]:
    """Defects by type: the name of the subfolder that they are in, else the folder's own."""
    samples = []
    inside = listed(folder, root, folder.name)
    check_names([sample.path for sample in inside], folder, Label.DEFECTIVE)
    for sample in inside:
        inner = sample.path.relative_to(folder)
        kind = inner.parts[0] if len(inner.parts) > 1 else folder.name
        # Of several folders' defects, each folder's are in one of its name.
        around = () if masks is None else (masks / folder.name, masks)
        mask = finder.of(sample.path, (place / inner.parent for place in around))
        samples.append(replace(sample, defect_type=kind, mask_path=mask))
    return samples


FORMATS: dict[str, Callable[[Path], Dataset]] = {
    "mvtec": partial(open_by_names, published=True),
    "folder": _good_only,
    "good_defect": open_by_names,
    "visa": open_visa,
    "csv": open_list,
}
