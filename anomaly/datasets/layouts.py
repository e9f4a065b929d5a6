"""Layouts of data sets: recognised by the names of folders, and opened as samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from anomaly.datasets.inputs import listing_of, open_list, open_visa
from anomaly.datasets.names import (
    CLEAR,
    Label,
    absolute,
    by_file_names,
    check_annotations,
    check_files,
    check_names,
    files_in,
    label_of,
    says_masks,
    split_of,
    undecided,
)
from anomaly.datasets.samples import (
    Dataset,
    Masks,
    Sample,
    in_splits,
    samples_in,
    set_apart,
    without_masks,
)
from anomaly.errors import DataError, nearest, some
from anomaly.files.writing import at_home, like, looked_in
from anomaly.imaging.read import is_folder, list_images, other_files

log = logging.getLogger(__name__)

LIST_SUFFIX = ".csv"
_HOW_TO_GET_MVTEC = (
    "Get MVTec AD from mvtec.com/company/research/datasets/mvtec-ad and name the folder of its "
    "categories (--set data.root=FOLDER); `anomaly demo` makes a data set to try things on."
)
_COLOUR = "rgb"  # the folder of each kind that has MVTec 3D AD's images


def open_dataset(layout: str, root: str | Path | None, category: str | None = None) -> Dataset:
    """List a data set.

    Args:
        layout: a key of `FORMATS`; docs/own-data.md shows what each looks like.
        root: the folder of the data set, or of its categories; with `csv`, the list or its folder.
        category: folder (or list) in `root`; None for `root` itself.

    Raises:
        DataError: the layout is unknown, something is missing or mistaken, or no image trains.
        AnomalyError: the root's `~` is nobody's home folder.
    """
    if root is None:
        raise DataError(
            "data.root isn't set: name the folder of your images (--set data.root=FOLDER)"
        )
    if layout not in FORMATS:
        raise DataError(f"unknown data.format {layout!r}; {nearest(layout, FORMATS)}")
    root = at_home(Path(root))
    place = root / (category or "")
    if layout == "csv" and is_folder(place):
        raise DataError(f"{place} is a folder; with data.format=csv, data.root names the list")
    if layout != "csv" and not is_folder(place):
        if root.is_file():
            raise DataError(f"{root} is a file; for a CSV list use --set data.format=csv")
        alike = f" ({nearest(str(category), folders_in(root))})" if is_folder(root) else ""
        hint = _HOW_TO_GET_MVTEC if layout == "mvtec" else "Correct data.root."
        raise DataError(f"{place} doesn't exist{alike or looked_in(root)}. {hint}")
    dataset = FORMATS[layout](place)
    log.debug("read as %s: %r", layout, dataset)
    return dataset


def folders_in(folder: Path) -> list[str]:
    """Names of a folder's subfolders, sorted; none where there is no such folder."""
    return [entry.name for entry in files_in(folder) if entry.is_dir()]


def _open_folder(folder: Path) -> Dataset:
    """A folder of good images, or of good and defective ones by the names of the files.

    Without defective ones, the test split is empty. Names or annotations that contradict good ones
    are refused.
    """
    good, bad = samples_in(folder), list[Sample]()
    if not good:
        raise DataError(
            f"no images in {folder}{other_files(folder)}; data.root must hold good images to learn "
            "from"
        )
    named = by_file_names([sample.path.stem for sample in good])
    if set(named.values()) >= CLEAR:
        if unclear := [s.path.name for s in good if named[s.path.stem] not in CLEAR]:
            raise undecided(folder, unclear, "files")
        bad = [s for s in good if named[s.path.stem] is Label.DEFECTIVE]
        good = [s for s in good if named[s.path.stem] is Label.GOOD]
        bad = [replace(sample, defect_type="defect") for sample in bad]
        message = "%s: %d images are good by the names of their files, %d defective"
        log.info(message, folder, len(good), len(bad))
    paths = [sample.path for sample in good]
    check_names(paths, folder, Label.GOOD)
    check_annotations(paths, folder)
    learned, tested = set_apart(good) if bad else (good, [])
    return Dataset(folder, tuple(learned), (*tested, *bad), drawn=bool(bad))


def labels_in(folder: Path, *, published: bool = False) -> dict[Path, Label]:
    """Labels of all folders that images lie right in, by path relative to `folder`.

    Names on the path that contradict each other make it unclear; masks are aside.

    Args:
        folder: its own name doesn't count.
        published: True if it is laid out as MVTec AD: what isn't in a split's folder is aside, and
            in `test` an unknown name is a kind of defect.
    """
    inside = dict.fromkeys(image.parent.relative_to(folder) for image in list_images(folder))
    return {inner: _label_within(inner, published) for inner in inside}


def _label_within(inner: Path, published: bool) -> Label:
    """Label of the images right in a folder; see `labels_in`."""
    split = _split_within(inner)
    # The folder of a split, such as `test`, has no label.
    names = [(name, label_of(name)) for name in inner.parts[1 if split else 0 :]]
    # Masks or previews; an inner folder may be named like a split, too.
    if any(label is Label.ASIDE and not split_of(name) for name, label in names):
        return Label.ASIDE
    if published and not (split and names):
        return Label.ASIDE
    labels = [label for _, label in names if label is not Label.PLACE]
    clear = {*labels} - {Label.UNKNOWN}
    if not clear:
        return Label.DEFECTIVE if published and split == "test" and labels else Label.UNKNOWN
    unknown_in_good = Label.GOOD in clear and labels[-1] is Label.UNKNOWN
    if unknown_in_good or len(clear) > 1 or not clear <= CLEAR:
        return Label.UNCLEAR
    return clear.pop()


def _split_within(inner: Path) -> str:
    """The split that a relative path's first folder names; empty where it names none."""
    return split_of(inner.parts[0]) if inner.parts else ""


def open_by_names(
    folder: Path, labels: Mapping[Path, Label] | None = None, *, published: bool = False
) -> Dataset:
    """A data set by the names of its folders, below those of splits (`train/good`) or without.

    Masks lie below a folder of masks, and `Masks` finds them by their names.

    Args:
        folder: its own name doesn't count.
        labels: labels from `labels_in`, or a person's; None for the former.
        published: as in `labels_in`.

    Raises:
        DataError: a folder's name doesn't tell, there are no good images, the names of files or
            texts beside them contradict their folder's, or two images have one mask.
    """
    labels = labels or labels_in(folder, published=published)
    masks = sorted({mask for inner in labels for mask in _masks_in(inner)})
    if unclear := [i for i, label in labels.items() if label not in {*CLEAR, Label.ASIDE}]:
        raise undecided(folder, [_say_folder(inner) for inner in unclear])
    files = list_images(folder)
    finder = Masks(files)
    samples = list[tuple[str, Sample]]()
    for path in without_masks(files):
        inner = path.parent.relative_to(folder)
        sample = Sample(path, path.relative_to(folder).as_posix())
        split = _split_within(inner)
        if labels[inner] is Label.GOOD:
            samples.append((split, sample))
        elif labels[inner] is Label.DEFECTIVE:
            around = [folder / place for place in _mask_places(inner, masks)]
            kind = next((p for p in reversed(inner.parts) if p != _COLOUR), "defect")
            mask = finder.of(path, around)
            # In any split's folder, defects test.
            samples.append((split and "test", replace(sample, defect_type=kind, mask_path=mask)))
    good = [sample.path for _, sample in samples if not sample.is_defect]
    check_files(good, folder, Label.GOOD)
    check_files([s.path for _, s in samples if s.is_defect], folder, Label.DEFECTIVE)
    check_annotations(good, folder)
    in_masks = (f for f in files if any(f.is_relative_to(folder / mask) for mask in masks))
    unused = [file for file in in_masks if not (finder.has(file) or _of_good(file, folder))]
    hint = "Put good images in good/ or train/good, defective ones in defect/ or defect/<type>/."
    return replace(in_splits(folder, samples, hint), unused_masks=tuple(unused))


def _of_good(mask: Path, folder: Path) -> bool:
    """True if a mask is a good image's, and so marks nothing, by the names of its folders."""
    return Label.GOOD in map(label_of, mask.relative_to(folder).parent.parts)


def _masks_in(inner: Path) -> list[Path]:
    """The topmost folder of masks among a folder and those around it; or none."""
    return [p for p in (*reversed(inner.parents), inner) if says_masks(p.name)][:1]


def _mask_places(inner: Path, masks: Sequence[Path]) -> Iterator[Path]:
    """Folders that may hold the masks of a folder of defects, the likeliest first.

    All paths are relative to the data set's folder.
    """
    for mask in masks:
        if mask.parent in (inner, *inner.parents):
            parts = inner.relative_to(mask.parent).parts
            # Below `defect/`, each kind has a folder of its own, and so have the masks.
            kinds = Label.DEFECTIVE in map(label_of, parts[:-1])
            yield from (mask.joinpath(*parts[i:]) for i in range(len(parts) + (not kinds)))


def _say_folder(inner: Path) -> str:
    """Name of a folder inside a data set's, for messages."""
    return inner.as_posix() if inner.parts else "the images outside of folders"


FORMATS: dict[str, Callable[[Path], Dataset]] = {
    "mvtec": partial(open_by_names, published=True),
    "folder": _open_folder,
    "good_defect": open_by_names,
    "visa": open_visa,
    "csv": open_list,
}


@dataclass(frozen=True)
class Recognised:
    """The layout that a folder is read as.

    Attributes:
        layout: a key of `FORMATS`.
        root: the folder of images, or the list of them.
        reason: the sign that it was recognised by, for people.
        listing: text of a list with a person's answers, to be written; empty without questions.
    """

    layout: str
    root: Path
    reason: str
    listing: str = ""


def recognise(
    place: Path, layout: str | None = None, ask: Callable[[str], str] | None = None
) -> Recognised:
    """The layout that a folder, or a list of images, is read as.

    Args:
        place: as a user named it.
        layout: the user's choice; None recognises it.
        ask: shows a question and returns a person's answer, or raises EOFError; None for nobody.

    Raises:
        DataError: the place doesn't exist, is a part of a data set, holds several or no images, or
            its folders' names don't tell which images are good.
        AnomalyError: the place's `~` is nobody's home folder.
    """
    place = absolute(at_home(place))
    if not place.exists():
        raise DataError(f"{place} doesn't exist{like(place)}; give a folder of images")
    if layout is not None:
        return Recognised(layout, place, "as you chose")
    if not is_folder(place):
        if place.suffix.lower() != LIST_SUFFIX:
            raise DataError(
                f"{place} is a file; give the folder that it is in, or a list ({LIST_SUFFIX})"
            )
        return Recognised("csv", place, "a list of images")
    if is_folder(place.parent / "split_csv"):
        return Recognised("visa", place, "a category beside split_csv")
    _check_whole(place)
    labels = labels_in(place)
    if {*labels.values()} - {Label.UNKNOWN, Label.ASIDE}:
        return _recognise_by_names(place, labels, ask)
    if labels:
        return Recognised("folder", place, "a folder of images")
    lists = [file for file in files_in(place) if file.suffix == LIST_SUFFIX]
    if len(lists) == 1:
        return Recognised("csv", lists[0], f"a list of images, {lists[0].name}")
    give = f", but lists: give one of them, e.g. {lists[0]}" if lists else other_files(place)
    raise DataError(f"no images in {place}{give or '; give a folder of good images'}")


def _is_whole(place: Path) -> bool:
    """True if a folder is a data set whose `train` has a folder named as good."""
    return any(label_of(name) is Label.GOOD for name in folders_in(place / "train"))


def _check_whole(place: Path) -> None:
    """Refuse a folder of several data sets, or a part of one other than `train` and good images."""
    if sets := [n for n in folders_in(place) if not split_of(n) and _is_whole(place / n)]:
        raise DataError(
            f"{place} holds several data sets: {some(sets, most=8)}; give one of them, e.g. "
            f"{place / sets[0]}"
        )
    if label_of(place.name) is Label.GOOD or place.name == "train":
        return
    if around := next(filter(_is_whole, place.parents[:2]), None):
        raise DataError(
            f"{place} is a part of {around}, which looks like a data set of its own; give "
            f"{around}, or add --format folder if all images in {place} are good"
        )


def _recognise_by_names(
    place: Path, labels: Mapping[Path, Label], ask: Callable[[str], str] | None
) -> Recognised:
    """The layout of a folder in which some folders' names say good or defective.

    A person is asked for other folders' labels; without an answer they are refused.
    """
    unclear = [i for i, label in labels.items() if label not in {*CLEAR, Label.ASIDE}]
    # In MVTec AD's layout, unclear names in `test` are kinds of defects.
    published = {*labels_in(place, published=True).values()} if unclear else set()
    if unclear and _is_whole(place) and published <= {*CLEAR, Label.ASIDE}:
        return Recognised("mvtec", place, "good images in train, kinds of defects in test")
    known = {**labels, **(_answers(place, labels, unclear, ask) if ask else {})}
    good = [inner for inner, label in known.items() if label is Label.GOOD]
    defective = [inner for inner, label in known.items() if label is Label.DEFECTIVE]
    reason = f"good images in {some([*map(_say_folder, good)], most=8)}"
    if defective:
        reason += f", others in {some([*map(_say_folder, defective)], most=8)}"
    if unclear:
        return Recognised("csv", place, reason, listing_of(open_by_names(place, known)))
    tops = {inner.parts[0] for inner in good}
    if not defective and Label.ASIDE not in labels.values() and not any(map(split_of, tops)):
        return Recognised("folder", place / tops.pop() if len(tops) == 1 else place, reason)
    return Recognised("good_defect", place, reason)


def _answers(
    place: Path, labels: Mapping[Path, Label], unclear: Sequence[Path], ask: Callable[[str], str]
) -> dict[Path, Label]:
    """Labels of unclear folders, which a person is asked for.

    One question covers a folder and all folders in it, if none of them has a clear name.
    """
    known = {p for i in labels.keys() - {*unclear} for p in (i, *i.parents)}
    tops = {i: next((p for p in (*reversed(i.parents), i) if p not in known), i) for i in unclear}
    answers = {top: _answer(place / top, ask) for top in dict.fromkeys(tops.values())}
    return {inner: answers[top] for inner, top in tops.items()}


def _answer(folder: Path, ask: Callable[[str], str]) -> Label:
    """Label of a folder, which a person is asked for; a word's beginning will do."""
    answers = {"good": Label.GOOD, "defective": Label.DEFECTIVE, "out": Label.ASIDE}
    try:
        answer = ask(
            f"Are the images in {folder} good or defective, or to be left out? "
            f"[{'/'.join(answers)}] "
        )
    except EOFError:  # Ctrl-D
        answer = ""
    for name, label in answers.items():
        if answer.strip() and name.startswith(answer.strip().lower()):
            return label
    raise DataError(
        f"{folder}: {answer!r} doesn't say whether its images are good; nothing was done"
    )
