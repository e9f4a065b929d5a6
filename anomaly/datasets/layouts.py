"""Layouts: what a data set's folders, or its list, say an image is."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anomaly.datasets.annotations import check_annotations, files_around, files_in
from anomaly.datasets.by_names import (
    CLEAR,
    check_defects,
    check_files,
    check_folders,
    check_good,
    open_by_names,
    undecided,
)
from anomaly.datasets.labels import (
    Label,
    by_file_names,
    label_of,
    only_places,
    says_masks,
)
from anomaly.datasets.lists import open_list, open_visa
from anomaly.datasets.masks import Masks, plain, strays
from anomaly.datasets.samples import (
    GOOD,
    Dataset,
    Sample,
    listed,
    no_training_images,
    set_apart,
)
from anomaly.errors import DataError
from anomaly.files.writing import like
from anomaly.imaging.listing import is_folder, list_images, other_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownLayout:
    """What a published layout is recognised by.

    Attributes:
        name: a key of `anomaly.datasets.FORMATS`.
        reason: what it is recognised by, for people.
        folders: each of them is there; the first holds good images.
        absent: none of them is.
    """

    name: str
    reason: str
    folders: tuple[str, ...]
    absent: tuple[str, ...] = ()

    def fits(self, place: Path) -> bool:
        """Whether a folder has this layout."""
        return (
            all(is_folder(place / name) for name in self.folders)
            and not any(is_folder(place / name) for name in self.absent)
            and not _beside_good(place, self.folders[0])
        )


def _beside_good(folder: Path, good: str) -> Path | None:
    """A folder of images in train/ beside the one of good images; None where there is none."""
    train = folder / "train"
    others = (train / name for name in (folders_in(train) if good.startswith("train/") else ()))
    beside = (place for place in others if not (folder / good).is_relative_to(place))
    return next((place for place in beside if list_images(place)), None)


KNOWN_LAYOUTS = (
    KnownLayout("mvtec_3d", "rgb/ in train/good, and in test", ("train/good/rgb", "test")),
    KnownLayout("mvtec_ad_2", "train/good beside test_public", ("train/good", "test_public")),
    KnownLayout(
        "mvtec_loco",
        "train, validation and test",
        ("train/good", "validation", "test"),
        ("train/good/rgb",),
    ),
    KnownLayout(
        "mvtec",
        "train/good, and test/ where there is one",
        ("train/good",),
        ("test_public", "testing", "eval", "validation", "valid", "val", "train/good/rgb"),
    ),
    KnownLayout("btad", "train/ok beside test", ("train/ok", "test")),
    KnownLayout("visa", "a category beside split_csv", ("../split_csv",)),
    KnownLayout("good_defect", "good/ beside defect/", ("good", "defect")),
)


@dataclass(frozen=True)
class _FolderLayout:
    """Where a published data set keeps what.

    Attributes:
        name: of the data set.
        train, validation: folders of good images.
        test: holds a folder for each kind of image.
        good: the name that good images' folders have in there.
        masks: holds a folder for each kind of defect: `<stem>_mask.png`, `<stem>.png` or a
            folder `<stem>` with several masks, see `Masks`.
        images: the folder in each of these that has the images; empty for themselves. Then `gt`
            beside it has the masks.
    """

    name: str
    train: str = "train/good"
    validation: str = "validation/good"
    test: str = "test"
    good: str = GOOD
    masks: str = "ground_truth"
    images: str = ""

    def __call__(self, folder: Path) -> Dataset:
        learned = folder / self.train / self.images
        if is_folder(learned / "rgb"):
            raise DataError(
                f"{folder} has images in {self.train}/rgb, as MVTec 3D AD: use --set "
                "data.format=mvtec_3d"
            )
        train = _good(learned, folder)
        if not train:
            raise no_training_images(
                learned,
                f"{self.name} layout keeps good images in {self.train}; for a plain folder of "
                "good images use --set data.format=folder, for folders with names of your own "
                "data.format=good_defect",
            )
        if place := _beside_good(folder, self.train):
            raise DataError(
                f"{place} is beside {learned}, but {self.name} layout has good images alone in "
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
                if label in (Label.ASIDE, Label.UNCLEAR) or only_places(kind):
                    raise undecided(test, [kind])
                check_defects((sample.path for sample in inside), place)
                samples += [replace(s, mask_path=finder.of(s.path, [where])) for s in inside]
        return samples


def _good_only(folder: Path) -> Dataset:
    train = listed(folder, folder)
    if not train:
        raise DataError(
            f"no images in {folder}{other_files(folder)}; data.root must hold good images to learn "
            "from"
        )
    paths = [sample.path for sample in train]
    check_folders(paths, folder, lambda bad: _other_layout(bad, plain(folder)))
    named = by_file_names([path.stem for path in paths])
    if not set(named.values()) >= CLEAR:
        check_files(paths, folder, Label.GOOD)
        return Dataset(folder, tuple(train), ())
    if open_ := [path.name for path in paths if named[path.stem] not in CLEAR]:
        raise undecided(folder, open_, "files")
    good = [s for s in train if named[s.path.stem] is Label.GOOD]
    bad = [replace(s, defect_type="defect") for s in train if s not in good]
    log.info(
        "%s: %d images are good by the names of their files, %d defective",
        folder, len(good), len(bad),
    )  # fmt: skip
    learned, tested = set_apart(good)
    return Dataset(folder, tuple(learned), (*tested, *bad), drawn=True)


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
            paths = [sample.path for sample in inside]
            check_good(paths, folder)
            check_annotations(paths, files_around(folder))
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
    check_defects((sample.path for sample in inside), folder)
    for sample in inside:
        inner = sample.path.relative_to(folder)
        kind = inner.parts[0] if len(inner.parts) > 1 else folder.name
        # Of several folders' defects, each folder's are in one of its name.
        around = () if masks is None else (masks / folder.name, masks)
        mask = finder.of(sample.path, (place / inner.parent for place in around))
        samples.append(replace(sample, defect_type=kind, mask_path=mask))
    return samples


def _good(folder: Path, root: Path) -> list[Sample]:
    samples = listed(folder, root)
    check_good((s.path for s in samples), folder, lambda bad: "move them elsewhere")
    return samples


def _other_layout(folder: Path, top: Path) -> str:
    """The settings for what a folder of defects, masks or test images inside `top` belongs to."""
    around = [place for place in (folder, *folder.parents) if place.is_relative_to(top.parent)]
    for place in around:
        for layout in KNOWN_LAYOUTS:
            if layout.fits(place):
                fits = f"use --set data.format={layout.name} {_root(place)}, whose layout this is"
                alone = f", or {_root(place / layout.folders[0])} for its good images alone"
                return fits if layout.name == "visa" else fits + alone
    for place in around:
        if named := [name for name in folders_in(place) if label_of(name) is Label.GOOD]:
            return (
                f"use {_root(place / named[0])} for the good images alone, or --set "
                f"data.format=good_defect {_root(place)}, which takes folders by their names"
            )
    return (
        "use --set data.root=… for a folder of good images alone, or lay them out as good/ and "
        "defect/ and use --set data.format=good_defect"
    )


def _root(folder: Path) -> str:
    return f"--set data.root={shlex.quote(str(folder))}"


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


FORMATS: dict[str, Callable[[Path], Dataset]] = {
    "mvtec": _FolderLayout("MVTec AD"),
    "mvtec_ad_2": _FolderLayout("MVTec AD 2", test="test_public", masks="test_public/ground_truth"),
    "mvtec_loco": _FolderLayout("MVTec LOCO AD"),
    "mvtec_3d": _FolderLayout("MVTec 3D AD", images="rgb"),
    "btad": _FolderLayout("BTAD", train="train/ok", validation="validation/ok", good="ok"),
    "folder": _good_only,
    "good_defect": open_by_names,
    "visa": open_visa,
    "csv": open_list,
}
