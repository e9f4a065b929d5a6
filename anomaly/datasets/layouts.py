"""Layouts: what a data set's folders, or its list, say an image is."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anomaly.datasets.exports import annotations_in, coco_samples, manifest_rows
from anomaly.datasets.labels import (
    Label,
    by_file_names,
    denies,
    label_of,
    meant_by,
    only_places,
    says_masks,
    split_of,
)
from anomaly.datasets.masks import Masks, entries_of, strays
from anomaly.datasets.samples import (
    GOOD,
    Dataset,
    Sample,
    listed,
    no_training_images,
    set_apart,
)
from anomaly.errors import DataError, nearest, some
from anomaly.files.outputs import left_by_system, own_outputs
from anomaly.files.storage import named
from anomaly.files.tables import Rows, read_rows
from anomaly.files.writing import like
from anomaly.imaging.listing import is_folder, list_images, other_files

log = logging.getLogger(__name__)

# Columns and splits of a list of one's own.
COLUMNS = ("path", "label", "mask", "split", "group")
_SPLITS = ("train", "validation", "test")
_CLEAR = {Label.GOOD, Label.DEFECTIVE}
_VISA_LIST = Path("split_csv") / "1cls.csv"


def first_not_good(folders: Iterable[Path], top: Path) -> Path | None:
    """The first folder whose images aren't good by its name, or by its neighbours'.

    Where a folder inside says good, those that don't mean something else.

    Args:
        folders: that hold images, inside `top` or `top` itself.
        top: counts where its name is clear and that of no product; those around it don't.
    """
    holding = set(folders)
    known = {f for folder in holding for f in (folder, *folder.parents) if f.is_relative_to(top)}
    labels = {f: label_of(f.name, alone=f == top) for f in known}
    if labels.get(top) is Label.UNCLEAR:
        labels[top] = Label.UNKNOWN
    if bad := [f for f in known if labels[f] not in (Label.GOOD, Label.UNKNOWN)]:
        return min(bad)
    good = {f for f in known if any(labels.get(g) is Label.GOOD for g in (f, *f.parents))}
    return min(holding - good, default=None) if good else None


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
        ("test_public", "validation", "valid", "val", "train/good/rgb"),
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
                    raise _undecided(test, [kind])
                check_defects((sample.path for sample in inside), place)
                samples += [replace(s, mask_path=finder.of(s.path, [where])) for s in inside]
        return samples


def _good_only(folder: Path) -> Dataset:
    if told := annotations_in(folder):
        layout, root, what = told
        raise DataError(
            f"{folder} has {what}, which says which images are good: use --set "
            f"data.format={layout} {_root(root)}"
        )
    train = listed(folder, folder)
    if not train:
        raise DataError(
            f"no images in {folder}{other_files(folder)}; data.root must hold good images to learn "
            "from"
        )
    paths = [sample.path for sample in train]
    _check_folders(paths, folder, lambda bad: _other_layout(bad, _plain(folder)))
    named = by_file_names(path.stem for path in paths)
    if named is None or Label.GOOD not in named.values():
        _check_files(paths, folder, Label.GOOD)
        return Dataset(folder, tuple(train), ())
    if open_ := [path.name for path in paths if named[path.stem] not in _CLEAR]:
        raise _undecided(folder, open_, "files")
    good = [s for s in train if named[s.path.stem] is Label.GOOD]
    bad = [replace(s, defect_type="defect") for s in train if s not in good]
    log.info("%s: %s", folder, say_named(len(good), len(bad)))
    learned, tested = set_apart(good)
    return Dataset(folder, tuple(learned), (*tested, *bad), drawn=True)


def say_named(good: int, defective: int) -> str:
    """What is said where the names of files tell good images from defective ones."""
    return f"{good} images are good by the names of their files, {defective} defective"


def labels_in(folder: Path) -> dict[Path, Label]:
    """What folders' names say of the images that lie right in them.

    Args:
        folder: its own name doesn't count.

    Returns:
        By the folder with images, relative to `folder`: unclear where names on the way to it
        contradict each other, aside for masks.
    """
    return {
        inner: _label_within(inner)
        for inner in dict.fromkeys(i.parent.relative_to(folder) for i in list_images(folder))
    }


def _label_within(inner: Path) -> Label:
    parts = inner.parts[_split_within(inner) != "" :]
    if any(map(says_masks, parts)):
        return Label.ASIDE
    said = {label_of(part) for part in parts} - {Label.UNKNOWN}
    if len(said) > 1 or not said <= _CLEAR:
        return Label.UNCLEAR
    return said.pop() if said else Label.UNKNOWN


def _split_within(inner: Path) -> str:
    return split_of(inner.parts[0]) if inner.parts else ""


def sorted_by_names(
    folder: Path, answers: Mapping[Path, Label] | None = None
) -> tuple[list[tuple[str, Sample]], tuple[Path, ...]]:
    """Good and defective images, told by the names of their folders, with the split of each.

    Behind them, the files among the masks that are no image's.

    Args:
        folder: its own name doesn't count.
        answers: what folders hold whose names don't tell, relative to `folder`; those that are
            neither good nor defective are left out.

    Raises:
        DataError: a folder's name doesn't tell.
    """
    labels = labels_in(folder)
    masks = {_masks_in(inner) for inner, label in labels.items() if label is Label.ASIDE}
    labels |= answers or {}
    if open_ := [i for i, label in labels.items() if label not in {*_CLEAR, Label.ASIDE}]:
        raise _undecided(folder, [say_folder(inner) for inner in open_])
    finder = Masks()
    samples: list[tuple[str, Sample]] = []
    for sample in listed(folder, folder, "defect"):
        inner = sample.path.parent.relative_to(folder)
        if labels[inner] not in _CLEAR:
            continue
        split, said = _split_within(inner), _says_defect(inner)
        # Masks may leave out what is above a kind of defect.
        ends = [Path(*inner.parts[i:]) for i in range(said + 2)]
        if labels[inner] is Label.GOOD:
            ends = [end for end in ends if end.parts]
        own = [mask for mask in sorted(masks) if _split_within(mask) in ("", split)]
        mask = finder.of(sample.path, (folder / mask / end for mask in own for end in ends))
        if labels[inner] is Label.GOOD:  # its mask, which marks nothing, isn't needed
            samples.append((split, replace(sample, defect_type=GOOD)))
        else:  # a subfolder names the kind
            kind = (inner.parts[said : said + 2] or inner.parts[-1:] or ("defect",))[-1]
            samples.append((split and "test", replace(sample, defect_type=kind, mask_path=mask)))
    for label in (Label.GOOD, Label.DEFECTIVE):
        alike = [s.path for _, s in samples if s.is_defect == (label is Label.DEFECTIVE)]
        _check_files(alike, folder, label)
    left = (file for mask in sorted(masks) for file in finder.left_in(folder / mask))
    return samples, tuple(left)


def say_folder(inner: Path) -> str:
    """A folder inside another, for people."""
    return inner.as_posix() if inner.parts else "the images outside of folders"


def _masks_in(inner: Path) -> Path:
    """The topmost folder of masks on the way to one."""
    return next(p for p in (*reversed(inner.parents), inner) if says_masks(p.name))


def _says_defect(inner: Path) -> int:
    """Which part of a path says that it holds defects; the number of its parts where none does."""
    labels = (label_of(part) for part in inner.parts)
    return next((i for i, said in enumerate(labels) if said is Label.DEFECTIVE), len(inner.parts))


def _undecided(folder: Path, names: Sequence[str], what: str = "folders") -> DataError:
    return DataError(
        f"{folder}: the names of these {what} don't tell whether images are good or defective: "
        f"{some(names)}. Rename them (`good …`, `defect …`), move them elsewhere, or list the "
        "images in a CSV file with the columns path and label (data.format=csv)"
    )


def _good_and_defect(folder: Path) -> Dataset:
    """Folders that say by their names what they hold: `good/`, `defect/` or `defect/<type>/`.

    In folders of splits (`train/good`) they are taken for these. Masks have the same names below
    `masks/`.
    """
    hint = "Put good images in good/, defective ones in defect/ or defect/<type>/."
    samples, left = sorted_by_names(folder)
    return replace(_in_splits(folder, samples, hint), unused_masks=left)


def _annotated(folder: Path) -> Dataset:
    """Images with annotations in COCO's form, as Roboflow exports them."""
    return _in_splits(folder, coco_samples(folder), "Images without annotations are the good ones.")


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


def check_good(
    images: Iterable[Path],
    folder: Path,
    remedy: Callable[[Path], str] = lambda bad: "name the folder of good images alone",
) -> None:
    """Refuse images that are to be taken as good where names say otherwise.

    Args:
        images: files in `folder`.
        folder: as given; its own name counts, those of the folders around it don't.
        remedy: what to do about images in such a folder, for the message.

    Raises:
        DataError: the message names the first such folder or file.
    """
    paths = list(images)
    _check_folders(paths, folder, remedy)
    _check_files(paths, folder, Label.GOOD)


def _check_folders(images: Iterable[Path], folder: Path, remedy: Callable[[Path], str]) -> None:
    top = _plain(folder)
    bad = first_not_good({_plain(image.parent) for image in images}, top)
    if bad is not None:
        all_in = "" if bad == top else f", like all in {top}"
        said = label_of(bad.name) in (Label.UNKNOWN, Label.GOOD)
        why = "beside folders named as good it may hold" if said else "by its name it holds"
        raise DataError(
            f"the images in {bad} would be taken as good{all_in}, but {why} others: {remedy(bad)}. "
            "If they are good, rename that folder"
        )


def _check_files(images: Sequence[Path], folder: Path, wanted: Label) -> None:
    named = by_file_names(path.stem for path in images) or {}
    others = [path.name for path in images if named.get(path.stem) in _CLEAR - {wanted}]
    if not others:
        return
    contrary = (_CLEAR - {wanted}).pop()
    what = f"the names of {len(others)} of {len(images)} files say {contrary} ({others[0]})"
    if wanted not in named.values() and not any(map(denies, others)):  # hole_1.png: a feature?
        log.warning("%s: taken as %s, but %s", folder, wanted, what)
        return
    raise DataError(
        f"the images in {folder} would all be taken as {wanted}, but {what}: move those elsewhere, "
        "or rename them"
    )


def check_defects(images: Iterable[Path], folder: Path) -> None:
    """Refuse images that are to be taken as defects where names say otherwise.

    Args:
        images: files in `folder`.
        folder: as given; its own name counts, those of the folders around it don't.

    Raises:
        DataError: the message names the first such folder or file.
    """
    paths, top = [_plain(image) for image in images], _plain(folder)
    for place in sorted({p for path in paths for p in path.parents if p.is_relative_to(top)}):
        label = label_of(place.name, alone=place == top)
        inner = place != top or says_masks(top.name)
        if label is Label.GOOD or (label is Label.ASIDE and inner):
            told = "it is good" if label is Label.GOOD else "it shows no part"
            raise DataError(
                f"what is in {place} lies among defects, but its folder's name says that {told}; "
                "move it elsewhere, or rename the folder"
            )
    _check_files(paths, folder, Label.DEFECTIVE)


def check_inputs(inputs: Iterable[Path], images: Iterable[Path], *, defects: bool = False) -> None:
    """Refuse files and folders that were given as good, or as defects, where names say otherwise.

    Args:
        inputs: as given.
        images: what was found in them.
        defects: whether they were given as defects; a file that is named as one may lie anywhere.

    Raises:
        DataError: as `check_good` and `check_defects`.
    """
    files = list(images)
    given = [(place, is_folder(place)) for place in inputs]
    for folder in {p if whole else p.parent for p, whole in given if whole or not defects}:
        inside = (file for file in files if file.is_relative_to(folder))
        (check_defects if defects else check_good)(inside, folder)


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


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100, `..` goes and links stay


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
    entries = entries_of(folder)
    own = own_outputs(folder, [entry.name for entry in entries])
    return sorted(
        e.name for e in entries if e.is_dir() and e.name not in own and not left_by_system(e.name)
    )


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
            if {label_of(name), label_of(row[name])} & _CLEAR:
                raise DataError(
                    f"{where}: there is no column label, but {name} ({row[name]!r}) seems to say "
                    "which images are good: call that column `label`, or remove it"
                )
        if not seen and others:
            log.warning(
                "%s has no column label, so all its images are taken for good; does %s say which "
                "are?",
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
        folders = [_plain(sample.path.parent) for _, sample in samples]
        label_them = "give the list a column label, with `good` or a kind of defect in each row"
        paths = [sample.path for _, sample in samples]
        check_good(paths, Path(os.path.commonpath(folders)), lambda bad: label_them)
    if numbers:
        log.info("%s: the label 0 is taken for good, other numbers for defects", file)
    kinds = {s.defect_type for _, s in samples if label_of(s.defect_type) is Label.UNKNOWN}
    if kinds:
        log.info("%s: taken for kinds of defect: %s", file, some(sorted(kinds), most=8))
    samples.sort(key=lambda entry: entry[1].name)
    hint = (
        "A list needs good images with the split `train`; good ones have the label good, another "
        "word for it, or 0"
    )
    return _in_splits(file, samples, hint)


def _in_splits(where: Path, samples: Sequence[tuple[str, Sample]], hint: str) -> Dataset:
    """Samples as the splits that each is in; those with none are drawn, all defects are tested."""
    train, validation, test = ([s for n, s in samples if n == split] for split in _SPLITS)
    undecided = [s for n, s in samples if not n]
    # Of a part with a defect all views are tested with, and so are those of a part that is tested.
    parts = {s.group for s in [*test, *(s for s in undecided if s.is_defect)]} - {None}
    test += [s for s in undecided if not s.is_defect and s.group in parts]
    learned, tested = set_apart(s for s in undecided if not s.is_defect and s.group not in parts)
    train += learned
    test += [*tested, *(s for s in undecided if s.is_defect)]
    if not train:
        raise no_training_images(where, hint)
    drawn = len(undecided) == len(samples)
    return Dataset(where, tuple(train), tuple(test), tuple(validation), drawn=drawn)


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
    return _in_splits(folder, samples, f"{file} must list some with the split `train`")


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
    if data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return manifest_rows(data, file)
    return read_rows(data, str(file), columns, needed or columns)


FORMATS: dict[str, Callable[[Path], Dataset]] = {
    "mvtec": _FolderLayout("MVTec AD"),
    "mvtec_ad_2": _FolderLayout("MVTec AD 2", test="test_public", masks="test_public/ground_truth"),
    "mvtec_loco": _FolderLayout("MVTec LOCO AD"),
    "mvtec_3d": _FolderLayout("MVTec 3D AD", images="rgb"),
    "btad": _FolderLayout("BTAD", train="train/ok", validation="validation/ok", good="ok"),
    "folder": _good_only,
    "coco": _annotated,
    "good_defect": _good_and_defect,
    "visa": open_visa,
    "csv": open_list,
}
