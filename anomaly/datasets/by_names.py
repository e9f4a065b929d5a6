"""Names of folders and files -> what the images are, or a refusal where they contradict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from anomaly.datasets.annotations import check_annotations, files_around, files_in
from anomaly.datasets.labels import Label, by_file_names, label_of, says_masks, split_of
from anomaly.datasets.masks import Masks, plain
from anomaly.datasets.samples import GOOD, Dataset, Sample, in_splits, listed
from anomaly.errors import DataError, some
from anomaly.imaging.listing import is_folder, list_images

CLEAR = {Label.GOOD, Label.DEFECTIVE}


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
    labels = {label_of(part) for part in parts} - {Label.UNKNOWN}
    if len(labels) > 1 or not labels <= CLEAR:
        return Label.UNCLEAR
    return labels.pop() if labels else Label.UNKNOWN


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
    masks = {_masks_in(inner) for inner, label in labels.items() if label is Label.ASIDE}
    labels |= answers or {}
    if open_ := [i for i, label in labels.items() if label not in {*CLEAR, Label.ASIDE}]:
        raise undecided(folder, [say_folder(inner) for inner in open_])
    finder = Masks()
    samples: list[tuple[str, Sample]] = []
    for sample in listed(folder, folder, "defect"):
        inner = sample.path.parent.relative_to(folder)
        if labels[inner] not in CLEAR:
            continue
        split, defect_part = _split_within(inner), _says_defect(inner)
        # Masks may leave out what is above a kind of defect.
        ends = [Path(*inner.parts[i:]) for i in range(defect_part + 2)]
        if labels[inner] is Label.GOOD:
            ends = [end for end in ends if end.parts]
        own = [mask for mask in sorted(masks) if _split_within(mask) in ("", split)]
        mask = finder.of(sample.path, (folder / mask / end for mask in own for end in ends))
        if labels[inner] is Label.GOOD:  # its mask, which marks nothing, isn't needed
            samples.append((split, replace(sample, defect_type=GOOD)))
        else:  # a subfolder names the kind
            kind = (inner.parts[defect_part : defect_part + 2] or inner.parts[-1:] or ("defect",))[
                -1
            ]
            samples.append((split and "test", replace(sample, defect_type=kind, mask_path=mask)))
    for label in (Label.GOOD, Label.DEFECTIVE):
        alike = [s.path for _, s in samples if s.is_defect == (label is Label.DEFECTIVE)]
        check_files(alike, folder, label)
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
    return next((i for i, label in enumerate(labels) if label is Label.DEFECTIVE), len(inner.parts))


def open_by_names(folder: Path) -> Dataset:
    """Folders that say by their names what they hold: `good/`, `defect/` or `defect/<type>/`.

    In folders of splits (`train/good`) they are taken for these. Masks have the same names below
    `masks/`.
    """
    hint = "Put good images in good/, defective ones in defect/ or defect/<type>/."
    samples, left = sorted_by_names(folder)
    return replace(in_splits(folder, samples, hint), unused_masks=left)


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
    check_folders(paths, folder, remedy)
    check_files(paths, folder, Label.GOOD)


def check_folders(images: Iterable[Path], folder: Path, remedy: Callable[[Path], str]) -> None:
    """Refuse images to be taken as good where folders' names say otherwise; see `check_good`.

    Where a folder inside says good, those that don't mean something else.
    """
    top, holding = plain(folder), {plain(image.parent) for image in images}
    known = {f for inner in holding for f in (inner, *inner.parents) if f.is_relative_to(top)}
    labels = {f: label_of(f.name, alone=f == top) for f in known}
    if labels.get(top) is Label.UNCLEAR:  # nor does the name of a product count
        labels[top] = Label.UNKNOWN
    bad = {f for f in known if labels[f] not in (Label.GOOD, Label.UNKNOWN)}
    why = "by its name it holds"
    if not bad and Label.GOOD in labels.values():
        good = {f for f in known if any(labels.get(g) is Label.GOOD for g in (f, *f.parents))}
        bad, why = holding - good, "beside folders named as good it may hold"
    if bad:
        first = min(bad)
        all_in = "" if first == top else f", like all in {top}"
        raise DataError(
            f"the images in {first} would be taken as good{all_in}, but {why} other images: "
            f"{remedy(first)}. If they are good, rename that folder"
        )


def check_files(images: Sequence[Path], folder: Path, wanted: Label) -> None:
    """Refuse images to be taken as good, or as defective, where names of files say otherwise."""
    named = by_file_names([path.stem for path in images])
    (contrary,) = CLEAR - {wanted}
    if others := [path.name for path in images if named[path.stem] is contrary]:
        raise DataError(
            f"the images in {folder} would all be taken as {wanted}, but the names of "
            f"{len(others)} of {len(images)} files say {contrary} ({some(others)}): move those "
            "elsewhere, or rename them"
        )


def check_defects(images: Iterable[Path], folder: Path) -> None:
    """Refuse images that are to be taken as defects where names say otherwise.

    Args:
        images: files in `folder`.
        folder: as given; its own name counts, those of the folders around it don't.

    Raises:
        DataError: the message names the first such folder or file.
    """
    paths, top = [plain(image) for image in images], plain(folder)
    for place in sorted({p for path in paths for p in path.parents if p.is_relative_to(top)}):
        label = label_of(place.name, alone=place == top)
        inner = place != top or says_masks(top.name)
        if label is Label.GOOD or (label is Label.ASIDE and inner):
            meaning = "they are good" if label is Label.GOOD else "they show no part"
            raise DataError(
                f"the images in {place} lie among defects, but the folder's name says that "
                f"{meaning}; move them elsewhere, or rename the folder"
            )
    check_files(paths, folder, Label.DEFECTIVE)


def check_inputs(inputs: Iterable[Path], images: Iterable[Path], *, defects: bool = False) -> None:
    """Refuse files and folders that were given as good, or as defects, where names say otherwise.

    Args:
        inputs: as given.
        images: what was found in them.
        defects: whether they were given as defects; a file that is named as one may lie anywhere.

    Raises:
        DataError: as `check_good`, `check_annotations` and `check_defects`.
    """
    files = list(images)
    # A folder may be given beside files of it.
    given = sorted((is_folder(place), place) for place in inputs)
    for folder, whole in {p if whole else p.parent: whole for whole, p in given}.items():
        inside = [file for file in files if file.is_relative_to(folder)]
        if not defects:
            check_good(inside, folder)
            check_annotations(inside, files_around(folder) if whole else files_in(folder))
        elif whole:
            check_defects(inside, folder)


def undecided(folder: Path, names: Sequence[str], what: str = "folders") -> DataError:
    """The error of folders, or files, whose names don't tell."""
    return DataError(
        f"{folder}: the names of these {what} don't say whether images are good or defective: "
        f"{some(names)}. Rename them (`good …`, `defect …`), move them elsewhere, or list the "
        "images in a CSV file with the columns path and label (data.format=csv)"
    )
