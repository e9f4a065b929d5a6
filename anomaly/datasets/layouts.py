"""Layouts: what a data set's folders, or its list, say an image is."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anomaly.datasets.masks import Masks, entries_of, strays
from anomaly.datasets.samples import (
    GOOD,
    Dataset,
    Sample,
    listed,
    no_training_images,
    set_apart,
)
from anomaly.errors import DataError, nearest
from anomaly.files.outputs import own_outputs
from anomaly.files.tables import Rows, read_rows
from anomaly.files.writing import like
from anomaly.imaging.listing import is_folder, other_files

log = logging.getLogger(__name__)

# Columns and splits of a list of one's own.
COLUMNS = ("path", "label", "mask", "split", "group")
_SPLITS = ("train", "validation", "test")
_VISA_LIST = Path("split_csv") / "1cls.csv"

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
GOOD_WORDS = frozenset(("good", "ok", "normal", "io", "gut", "gute", "pass", "passed", "healthy"))
_MASKS = frozenset(("mask", "masks", "gt", "truth", "groundtruth"))
_NEGATIONS = frozenset(("no", "not", "non"))
_NOT_GOOD = re.compile(
    "defect(s|ive)?|defekte?|fehler|fault(s|y)?|flaws?|bad|ko|ng|nok|nio|fail(ed|ures?)?|"
    "reject(s|ed)?|scrap|anomal(y|ies|ous)|abnormal|tests?|testing|masks?|gt|truth|groundtruth"
)
# What names are coupled with: `bad_parts`, `test_public`, `ground_truth`.
_BESIDE = re.compile(
    "ground|public|private|mixed|set|data|split|types?|parts?|images?|imgs?|samples?|pictures?"
)


def says_not_good(name: str) -> bool:
    """Whether a folder's name is that of defects, of masks or of a test split.

    All of its words have to be: `bad_parts`, `test_public`, `not-ok`, but not `no_defects` or
    `test_line_3`.
    """
    words = _words(name)
    telling = {word for word in words if not _BESIDE.fullmatch(word)}
    if words & _NEGATIONS:
        return bool(words & GOOD_WORDS) and telling <= GOOD_WORDS | _NEGATIONS
    return bool(telling) and all(map(_NOT_GOOD.fullmatch, telling))


def says_good(name: str) -> bool:
    """Whether a folder's name is that of good images."""
    words = _words(name)
    return bool(words & GOOD_WORDS) and not (
        words & _NEGATIONS or any(map(_NOT_GOOD.fullmatch, words))
    )


def says_masks(name: str) -> bool:
    """Whether a folder's name is that of masks."""
    return bool(_words(name) & _MASKS)


def first_not_good(folders: Iterable[Path], top: Path) -> Path | None:
    """The first folder that doesn't look like good images by its name, or its neighbours'.

    Beside a folder `good`, others mean something else.

    Args:
        folders: that hold images, inside `top` or `top` itself.
        top: its own name counts; those of the folders around it don't.
    """
    known = {f for folder in folders for f in (folder, *folder.parents) if f.is_relative_to(top)}
    beside_good = {folder.parent for folder in known - {top} if says_good(folder.name)}
    for folder in sorted(known):
        if says_not_good(folder.name):
            return folder
        if folder != top and folder.parent in beside_good and not says_good(folder.name):
            return folder
    return None


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


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
        return all(is_folder(place / name) for name in self.folders) and not any(
            is_folder(place / name) for name in self.absent
        )


KNOWN_LAYOUTS = (
    KnownLayout("mvtec_ad_2", "train/good beside test_public", ("train/good", "test_public")),
    KnownLayout("mvtec_loco", "train, validation and test", ("train/good", "validation", "test")),
    KnownLayout(
        "mvtec",
        "train/good, and test/ where there is one",
        ("train/good",),
        ("test_public", "validation"),
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
    """

    name: str
    train: str = "train/good"
    validation: str = "validation/good"
    test: str = "test"
    good: str = GOOD
    masks: str = "ground_truth"

    def __call__(self, folder: Path) -> Dataset:
        train = _good(folder / self.train, folder)
        if not train:
            raise no_training_images(
                folder / self.train,
                f"{self.name} layout keeps good images in {self.train}; for a plain folder of "
                "good images use --set data.format=folder",
            )
        validation = listed(folder / self.validation, folder)
        finder = Masks()
        test = self._tested(folder, finder)
        left = finder.left_in(_masks_in(folder / self.masks))
        return Dataset(folder, tuple(train), tuple(test), tuple(validation), left)

    def _tested(self, folder: Path, finder: Masks) -> list[Sample]:
        test, masks = folder / self.test, _masks_in(folder / self.masks)
        samples: list[Sample] = []
        for kind in folders_in(test):
            if test / kind == masks:
                continue
            is_good = kind == self.good
            for sample in listed(test / kind, folder, GOOD if is_good else kind):
                mask = finder.of(sample.path, masks / kind)
                samples.append(sample if is_good else replace(sample, mask_path=mask))
        return samples


def _good_only(folder: Path) -> Dataset:
    train = listed(folder, folder)
    check_good((s.path for s in train), folder, lambda bad: _other_layout(bad, _plain(folder)))
    if not train:
        raise DataError(
            f"no images in {folder}{other_files(folder)}; data.root must hold good images to learn "
            "from"
        )
    return Dataset(folder, tuple(train), ())


def _good_and_defect(folder: Path) -> Dataset:
    """`good/`, `defect/` or `defect/<type>/`, and masks of the same names below `masks/`."""
    train, test = set_apart(_good(folder / "good", folder))
    if not train:
        hint = "Put good images in good/, defective ones in defect/ or defect/<type>/."
        raise no_training_images(folder / "good", hint)
    masks, finder = _masks_in(folder / "masks"), Masks()
    test += _defects_in(folder / "defect", folder, masks, finder)
    for good in (*train, *test):
        if not good.is_defect:  # its mask, which marks nothing, isn't needed
            finder.of(good.path, masks / good.path.relative_to(folder).parent)
    left = finder.left_in(masks)
    return Dataset(folder, tuple(train), tuple(test), unused_masks=left, drawn=True)


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
    folders = [*((_plain(f), True) for f in good), *((_plain(f), False) for f in defects)]
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
            check_good((sample.path for sample in inside), folder)
        for sample in inside:
            if samples.setdefault(sample.path, sample) != sample:
                raise DataError(f"{sample.path} is given as good and as a defect; give it once")
    bad = [sample for sample in samples.values() if sample.is_defect]
    if masks is not None and not any(sample.mask_path for sample in bad):
        wanted = masks / bad[0].defect_type / f"{bad[0].path.stem}.png"
        raise DataError(
            f"none of {len(bad)} defects has a mask in {masks}: that of {bad[0].path} would be "
            f"{wanted}, say; masks are named like their images, with or without _mask behind it"
        )
    if tell and masks is not None and (unused := strays(finder.left_in(masks))):
        log.warning("%s", unused)
    return tuple(samples.values())


def _defects_in(folder: Path, root: Path, masks: Path | None, finder: Masks) -> list[Sample]:
    """Defects by type: the name of the subfolder that they are in, else the folder's own."""
    samples = []
    for sample in listed(folder, root, folder.name):
        inner = sample.path.relative_to(folder)
        kind = inner.parts[0] if len(inner.parts) > 1 else folder.name
        if kind.lower() in (GOOD, "ok"):
            raise DataError(
                f"{sample.path} lies among defects, but its folder's name says that it is good; "
                "move it to the good images, or rename the folder"
            )
        mask = None
        if masks is not None:  # of several folders' defects, each folder's are in one of its name
            mask = finder.of(sample.path, masks / folder.name / inner.parent)
            mask = mask or finder.of(sample.path, masks / inner.parent)
        samples.append(replace(sample, defect_type=kind, mask_path=mask))
    return samples


def _good(folder: Path, root: Path) -> list[Sample]:
    samples = listed(folder, root)
    check_good((s.path for s in samples), folder, lambda bad: "move them elsewhere")
    return samples


def check_good(
    images: Iterable[Path],
    folder: Path,
    remedy: Callable[[Path], str] = lambda bad: "name the folder of good images alone",
) -> None:
    """Refuse images that are to be taken as good where the names of their folders say otherwise.

    Args:
        images: files in `folder`.
        folder: as given; its own name counts, those of the folders around it don't.
        remedy: what to do about images in such a folder, for the message.

    Raises:
        DataError: the message names the first such folder.
    """
    top = _plain(folder)
    bad = first_not_good((_plain(image).parent for image in images), top)
    if bad is not None:
        all_in = "" if bad == top else f", like all in {top}"
        raise DataError(
            f"the images in {bad} would be taken as good{all_in}, but by its name it holds others: "
            f"{remedy(bad)}. If they are good, rename that folder"
        )


def check_good_inputs(inputs: Iterable[Path], images: Iterable[Path]) -> None:
    """Refuse files and folders that were given as good where their folders' names say otherwise.

    Args:
        inputs: as given.
        images: what was found in them.

    Raises:
        DataError: as `check_good`.
    """
    files = list(images)
    for folder in {place if is_folder(place) else place.parent for place in inputs}:
        check_good((file for file in files if file.is_relative_to(folder)), folder)


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
        if named := [name for name in folders_in(place) if says_good(name)]:
            return (
                f"use {_root(place / named[0])} for the good images alone, or name {folder.name} "
                f"`defect`, {named[0]} `good`, and use --set data.format=good_defect {_root(place)}"
            )
    return (
        "use --set data.root=… for a folder of good images alone, or lay them out as good/ and "
        "defect/ and use --set data.format=good_defect"
    )


def _root(folder: Path) -> str:
    return f"--set data.root={shlex.quote(str(folder))}"


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100, `..` goes and links stay


def _masks_in(folder: Path) -> Path:
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
    entries = entries_of(folder)
    own = own_outputs(folder, [entry.name for entry in entries])
    return sorted(e.name for e in entries if e.is_dir() and e.name not in own)


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
        samples.append((_split_of(row, sample, where), sample))
    samples.sort(key=lambda entry: entry[1].name)
    train, validation, test = ([s for n, s in samples if n == split] for split in _SPLITS)
    undecided = [s for n, s in samples if not n]
    # Of a part with a defect all views are tested with, and so are those of a part that is tested.
    parts = {s.group for s in [*test, *(s for s in undecided if s.is_defect)]} - {None}
    test += [s for s in undecided if not s.is_defect and s.group in parts]
    learned, tested = set_apart(s for s in undecided if not s.is_defect and s.group not in parts)
    train += learned
    test += [*tested, *(s for s in undecided if s.is_defect)]
    return replace(_dataset(file, train, test, validation), drawn=len(undecided) == len(samples))


def open_visa(folder: Path) -> Dataset:
    """A category of VisA, in the one-class split: `split_csv/1cls.csv` beside the categories.

    Raises:
        DataError: no such list, or none of its rows is of this category.
    """
    root, category = folder.parent, folder.name
    file = root / _VISA_LIST
    rows = list(_rows(file, ("object", "split", "label", "image", "mask")))
    own = [row for _, row in rows if row["object"] == category]
    if not own:
        known = nearest(category, (row["object"] for _, row in rows))
        raise DataError(f"{file} lists no category {category!r}; {known}")
    splits: dict[str, list[Sample]] = {"train": [], "test": []}
    for row in own:
        defect_type = GOOD if row["label"] == "normal" else row["label"]
        mask = root / row["mask"] if row["mask"] else None
        sample = Sample(root / row["image"], row["image"], defect_type, mask)
        splits.setdefault(row["split"], []).append(sample)
    return _dataset(folder, splits["train"], splits["test"])


def _dataset(
    where: Path, train: Sequence[Sample], test: Sequence[Sample], validation: Sequence[Sample] = ()
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
        defect_type=meant_by(row.get("label", "")),
        mask_path=folder / mask if mask else None,
        group=row.get("group", "").strip() or None,
    )


def meant_by(label: str) -> str:
    """What a label in a list says that an image is: `good`, or a kind of defect."""
    label = label.strip()
    if label.lower() in GOOD_WORDS | {"", "0"}:
        return GOOD
    return "defect" if label == "1" else label


def _split_of(row: dict[str, str], sample: Sample, where: str) -> str:
    """The split that a row names; empty where it names none."""
    split = row.get("split", "").strip()
    if split and split not in _SPLITS:
        raise DataError(f"{where}: unknown split {split!r}; {nearest(split, _SPLITS)}")
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
    return read_rows(data, str(file), columns, needed or columns)


FORMATS: dict[str, Callable[[Path], Dataset]] = {
    "mvtec": _FolderLayout("MVTec AD"),
    "mvtec_ad_2": _FolderLayout("MVTec AD 2", test="test_public", masks="test_public/ground_truth"),
    "mvtec_loco": _FolderLayout("MVTec LOCO AD"),
    "btad": _FolderLayout("BTAD", train="train/ok", validation="validation/ok", good="ok"),
    "folder": _good_only,
    "good_defect": _good_and_defect,
    "visa": open_visa,
    "csv": open_list,
}
