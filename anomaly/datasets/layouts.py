"""Layouts: what a data set's folders say an image is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    no_training_images,
    set_apart,
)
from anomaly.errors import DataError
from anomaly.files.writing import like
from anomaly.imaging.listing import is_folder, list_images, other_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Where a published data set keeps what, and what it is recognised by.

    Attributes:
        name: a key of `FORMATS`.
        title: the data set that has it.
        needed: folders that are there; the first holds the good images to learn from.
        absent: folders that aren't.
        validation: a folder of further good images.
        test: holds a folder for each kind of image.
        good: the name that good images' folders have in there.
        masks: holds a folder for each kind of defect, see `Masks`.
        images: the folder in each of these that has the images; empty for themselves. Then `gt`
            beside it has the masks.
    """

    name: str
    title: str
    needed: tuple[str, ...] = ("train/good",)
    absent: tuple[str, ...] = ()
    validation: str = "validation/good"
    test: str = "test"
    good: str = GOOD
    masks: str = "ground_truth"
    images: str = ""

    def fits(self, place: Path) -> bool:
        """Whether a folder has this layout: its good images are alone in train/."""
        return (
            all(is_folder(place / name) for name in self.needed)
            and not any(is_folder(place / name) for name in self.absent)
            and not self._beside_good(place)
        )

    def _beside_good(self, folder: Path) -> Path | None:
        """A folder of images in train/ beside the one of good images; None where there is none."""
        beside = (folder / "train" / name for name in folders_in(folder / "train"))
        good = folder / self.needed[0]
        return next((p for p in beside if not good.is_relative_to(p) and list_images(p)), None)

    def __call__(self, folder: Path) -> Dataset:
        """The data set in a folder."""
        learned = folder / self.needed[0]
        if is_folder(learned / "rgb"):
            raise DataError(
                f"{folder} has images in {self.needed[0]}/rgb, as MVTec 3D AD: use --set "
                "data.format=mvtec_3d"
            )
        train = _good(learned, folder)
        if not train:
            raise no_training_images(
                learned,
                f"{self.title} layout keeps good images in {self.needed[0]}; for a plain folder of "
                "good images use --set data.format=folder, for folders with names of your own "
                "data.format=good_defect",
            )
        if place := self._beside_good(folder):
            raise DataError(
                f"{place} is beside {learned}, but {self.title} layout has good images alone in "
                "train; use --set data.format=good_defect, which takes folders by their names"
            )
        validation = _good(folder / self.validation / self.images, folder)
        finder = Masks()
        test = self._tested(folder, finder)
        left = finder.left_in(_mask_folder(folder / self.masks))
        return Dataset(folder, tuple(train), tuple(test), tuple(validation), left)

    def _tested(self, folder: Path, finder: Masks) -> list[Sample]:
        test, masks = folder / self.test, _mask_folder(folder / self.masks)
        samples: list[Sample] = []
        for kind in folders_in(test):
            place = test / kind / self.images
            label = Label.GOOD if kind == self.good else label_of(kind)
            where = test / kind / "gt" if self.images else masks / kind
            if label is Label.GOOD:
                samples += (good := _good(place, folder))
                for sample in good:  # its mask, which marks nothing, isn't needed
                    finder.of(sample.path, [where])
            elif test / kind != masks and (inside := listed(place, folder, kind)):
                if label not in {Label.DEFECTIVE, Label.UNKNOWN}:
                    raise undecided(test, [kind])
                check_names([sample.path for sample in inside], place, Label.DEFECTIVE)
                samples += [replace(s, mask_path=finder.of(s.path, [where])) for s in inside]
        return samples


# The first that fits is a folder's.
LAYOUTS = (
    Layout("mvtec_3d", "MVTec 3D AD", ("train/good/rgb", "test"), images="rgb"),
    Layout(
        "mvtec_ad_2",
        "MVTec AD 2",
        ("train/good", "test_public"),
        test="test_public",
        masks="test_public/ground_truth",
    ),
    Layout("mvtec", "MVTec AD", absent=("testing", "eval", "valid", "val")),
    Layout("btad", "BTAD", ("train/ok", "test"), validation="validation/ok", good="ok"),
)


def layout_of(place: Path) -> Layout | None:
    """The published layout that a folder has; None where it has none."""
    return next((layout for layout in LAYOUTS if layout.fits(place)), None)


def _good(folder: Path, root: Path) -> list[Sample]:
    samples = listed(folder, root)
    check_names([sample.path for sample in samples], folder, Label.GOOD)
    return samples


def _mask_folder(folder: Path) -> Path:
    """The folder of masks of a layout, or the only one beside it that is named as one."""
    if is_folder(folder):
        return folder
    named = [name for name in folders_in(folder.parent) if says_masks(name)]
    return folder.parent / named[0] if len(named) == 1 else folder


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


def labels_in(folder: Path) -> dict[Path, Label]:
    """What folders' names say of the images that lie right in them.

    Args:
        folder: its own name doesn't count.

    Returns:
        By the folder with images, relative to `folder`: unclear where names on the way to it
        contradict each other, aside for masks.
    """
    inside = dict.fromkeys(image.parent.relative_to(folder) for image in list_images(folder))
    return {inner: _label_within(inner) for inner in inside}


def _label_within(inner: Path) -> Label:
    parts = inner.parts[_split_within(inner) != "" :]
    if any(map(says_masks, parts)):
        return Label.ASIDE
    labels = [label for part in parts if (label := label_of(part)) is not Label.PLACE]
    clear = {*labels} - {Label.UNKNOWN}
    if clear == {Label.GOOD} and labels[-1] is Label.UNKNOWN:
        return Label.UNCLEAR
    if len(clear) > 1 or not clear <= CLEAR:
        return Label.UNCLEAR
    return clear.pop() if clear else Label.UNKNOWN


def _split_within(inner: Path) -> str:
    return split_of(inner.parts[0]) if inner.parts else ""


def sorted_by_names(
    folder: Path, answers: Mapping[Path, Label] | None = None
) -> tuple[list[tuple[str, Sample]], tuple[Path, ...]]:
    """Good and defective images by the names of their folders, with the split of each.

    Behind them, the files among the masks that are no image's.

    Args:
        folder: its own name doesn't count.
        answers: what folders hold whose names don't tell, relative to `folder`; those that are
            neither good nor defective are left out.

    Raises:
        DataError: a folder's name doesn't tell.
    """
    labels = labels_in(folder)
    masks = sorted({_masks_in(inner) for inner, label in labels.items() if label is Label.ASIDE})
    labels |= answers or {}
    if open_ := [i for i, label in labels.items() if label not in {*CLEAR, Label.ASIDE}]:
        raise undecided(folder, [say_folder(inner) for inner in open_])
    finder = Masks()
    samples: list[tuple[str, Sample]] = []
    for sample in listed(folder, folder, "defect"):
        inner = sample.path.parent.relative_to(folder)
        if labels[inner] not in CLEAR:
            continue
        split, is_good = _split_within(inner), labels[inner] is Label.GOOD
        # Masks may leave out what is above a kind of defect.
        kinds = is_good or Label.DEFECTIVE in map(label_of, inner.parts[:-1])
        ends = [Path(*inner.parts[i:]) for i in range(len(inner.parts) + (not kinds))]
        own = [mask for mask in masks if _split_within(mask) in ("", split)]
        mask = finder.of(sample.path, (folder / mask / end for mask in own for end in ends))
        if is_good:  # its mask, which marks nothing, isn't needed
            samples.append((split, replace(sample, defect_type=GOOD)))
        else:
            kind = inner.name or "defect"
            samples.append((split and "test", replace(sample, defect_type=kind, mask_path=mask)))
    for label in (Label.GOOD, Label.DEFECTIVE):
        alike = [s.path for _, s in samples if s.is_defect == (label is Label.DEFECTIVE)]
        check_files(alike, folder, label)
    left = (file for mask in masks for file in finder.left_in(folder / mask))
    return samples, tuple(left)


def say_folder(inner: Path) -> str:
    """A folder inside another, for people."""
    return inner.as_posix() if inner.parts else "the images outside of folders"


def _masks_in(inner: Path) -> Path:
    """The topmost folder of masks on the way to one."""
    return next(p for p in (*reversed(inner.parents), inner) if says_masks(p.name))


def _by_names(folder: Path) -> Dataset:
    """Folders that say by their names what they hold: `good/`, `defect/` or `defect/<type>/`.

    In folders of splits (`train/good`) they are taken for these. Masks have the same names below
    `masks/`.
    """
    hint = "Put good images in good/, defective ones in defect/ or defect/<type>/."
    samples, left = sorted_by_names(folder)
    return replace(in_splits(folder, samples, hint), unused_masks=left)


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
    **{layout.name: layout for layout in LAYOUTS},
    "folder": _good_only,
    "good_defect": _by_names,
    "visa": open_visa,
    "csv": open_list,
}
