"""Layouts: recognised and opened, by what a data set's folders say an image is."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from anomaly.datasets.lists import open_list, open_visa
from anomaly.datasets.names import (
    CLEAR,
    Label,
    by_file_names,
    check_files,
    check_good,
    check_names,
    files_in,
    label_of,
    plain,
    says_masks,
    split_of,
    undecided,
)
from anomaly.datasets.samples import (
    GOOD,
    Dataset,
    Masks,
    Sample,
    in_splits,
    listed,
    set_apart,
)
from anomaly.errors import DataError, some
from anomaly.files.writing import at_home, left_by_system, like
from anomaly.imaging.read import is_folder, list_images, other_files

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


def open_test_images(good: Sequence[Path], defects: Sequence[Path]) -> tuple[Sample, ...]:
    """Images to test with from folders of good and of defective ones.

    Args:
        good: folders of good images.
        defects: folders of defects; a subfolder names their type, else the folder itself.

    Raises:
        DataError: a folder is missing or holds no images, or good ones by their folders' names
            aren't.
    """
    folders = [*((plain(f), True) for f in good), *((plain(f), False) for f in defects)]
    root = Path(os.path.commonpath([folder.parent for folder, _ in folders]))
    samples: dict[Path, Sample] = {}
    for folder, is_good in folders:
        if not is_folder(folder):
            missing = "is no folder" if folder.exists() else f"doesn't exist{like(folder)}"
            raise DataError(f"{folder} {missing}; give a folder of images to test with")
        inside = listed(folder, root) if is_good else _defects_in(folder, root)
        if not inside:
            raise DataError(f"no images in {folder}; give a folder of images to test with")
        if is_good:
            check_good([sample.path for sample in inside], folder)
        for sample in inside:
            if samples.setdefault(sample.path, sample) != sample:
                raise DataError(f"{sample.path} is given as good and as a defect; give it once")
    return tuple(samples.values())


def _defects_in(folder: Path, root: Path) -> list[Sample]:
    """Defects by type: the name of the subfolder that they are in, else the folder's own."""
    samples = []
    inside = listed(folder, root, folder.name)
    check_names([sample.path for sample in inside], folder, Label.DEFECTIVE)
    for sample in inside:
        inner = sample.path.relative_to(folder)
        kind = inner.parts[0] if len(inner.parts) > 1 else folder.name
        samples.append(replace(sample, defect_type=kind))
    return samples


FORMATS: dict[str, Callable[[Path], Dataset]] = {
    "mvtec": partial(open_by_names, published=True),
    "folder": _good_only,
    "good_defect": open_by_names,
    "visa": open_visa,
    "csv": open_list,
}


LIST_SUFFIX = ".csv"


@dataclass(frozen=True)
class Recognised:
    """The layout that a folder is read as.

    Attributes:
        layout: a key of `anomaly.datasets.FORMATS`.
        root: the folder of images, or the list of them.
        reason: what it was recognised by, for people.
        listing: the lines of a list that has to be written for it; empty where none has.
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
        layout: takes it for that one, whatever it looks like.
        ask: shows a question and returns the answer, or raises EOFError: what folders hold whose
            names don't tell, beside others whose names do; None where there is no one to ask.

    Raises:
        DataError: it doesn't exist, holds several data sets or no images, has several layouts, or
            its folders' names don't tell which are good.
        AnomalyError: its `~` stands for nobody's home folder.
    """
    place = plain(at_home(place))
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
    return _own_names(place, ask) or _plain(place)


def _is_whole(place: Path) -> bool:
    """True if a folder is a data set with good images in its `train`."""
    return any(label_of(name) is Label.GOOD for name in folders_in(place / "train"))


def _check_whole(place: Path) -> None:
    """Refuse several data sets, and a part of one that isn't its good images, such as `test`.

    Raises:
        DataError: it is one.
    """
    if sets := [n for n in folders_in(place) if not split_of(n) and _is_whole(place / n)]:
        raise DataError(
            f"{place} holds several data sets: {some(sets, most=8)}; give one of them, e.g. "
            f"{place / sets[0]}"
        )
    if label_of(place.name) is Label.GOOD or place.name == "train":
        return
    for around in (place.parent, place.parent.parent):
        if _is_whole(around):
            raise DataError(
                f"{place} is a part of {around}, which looks like a data set of its own; give "
                f"{around}, or add --format folder if all images in {place} are good"
            )


def _own_names(place: Path, ask: Callable[[str], str] | None) -> Recognised | None:
    """Folders whose names say what they hold; None where none does."""
    labels = labels_in(place)
    if set(labels.values()) <= {Label.UNKNOWN, Label.ASIDE}:
        return None
    open_ = [i for i, label in labels.items() if label not in {*CLEAR, Label.ASIDE}]
    published = open_ and labels_in(place, published=True)
    if published and _is_whole(place) and set(published.values()) <= {*CLEAR, Label.ASIDE}:
        return Recognised("mvtec", place, "good images in train, kinds of defects in test")
    answers: dict[Path, Label] = {}
    if ask is not None:
        known = {p for i in labels.keys() - set(open_) for p in (i, *i.parents)}
        # Once for all folders in one that holds none of a clear name.
        outer = {
            i: next((p for p in (*reversed(i.parents), i) if p not in known), i) for i in open_
        }
        answered = {top: _answer(place / top, ask) for top in dict.fromkeys(outer.values())}
        answers = {inner: answered[top] for inner, top in outer.items()}
    good = [inner for inner, label in (labels | answers).items() if label is Label.GOOD]
    if not good and (Label.DEFECTIVE in labels.values() or answers):
        raise DataError(
            f"{place} has folders of defects or tests "
            f"({some([say_folder(inner) for inner in labels], most=8)}), but none that is named as "
            "good. Put the good images into a folder `good`, or give their folder alone"
        )
    dataset = open_by_names(place, answers)
    defects = (sample.path.parent for sample in dataset.test if sample.is_defect)
    others = [path.relative_to(place).as_posix() for path in dict.fromkeys(defects)]
    reason = f"good images in {some([i.as_posix() for i in good], most=8)}"
    if others:
        reason += f", others in {some(others, most=8)}"
    if answers:
        return Recognised("csv", place, reason, listing_of(dataset))
    tops = {inner.parts[0] for inner in good}
    if not others and Label.ASIDE not in labels.values() and not any(map(split_of, tops)):
        root = place / tops.pop() if len(tops) == 1 else place
        return Recognised("folder", root, reason)
    return Recognised("good_defect", place, reason)


def _answer(folder: Path, ask: Callable[[str], str]) -> Label:
    """What someone says that a folder holds."""
    question = (
        f"Are the images in {folder} good or defective, or to be left out? [good/defective/out] "
    )
    answers = {"good": Label.GOOD, "defective": Label.DEFECTIVE, "out": Label.ASIDE}
    try:
        answer = ask(question).strip().lower()
    except EOFError:  # Ctrl-D
        answer = ""
    for name, label in answers.items():
        if answer and name.startswith(answer):
            return label
    raise DataError(
        f"{folder}: {answer!r} doesn't say whether its images are good; nothing was done"
    )


def listing_of(dataset: Dataset, copies: Iterable[Sequence[str]] = ()) -> str:
    """The lines of a list of a data set; marked as UTF-8, so that names that are no text are kept.

    Args:
        dataset: its splits are named, unless they are drawn.
        copies: names of images that show the same: they are views of one part.
    """
    part = {name: f"copies of {names[0]}" for names in copies for name in names}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("path", "label", "mask", "split", "group"))
    for split, sample in ((name, s) for name, inside in dataset.splits.items() for s in inside):
        kind = sample.defect_type
        if sample.is_defect:  # `0`, and what somebody has said is one
            kinds = (kind, f"defect {kind}", "defect")
            kind = next(k for k in kinds if label_of(k) is Label.DEFECTIVE)
        group = sample.group or part.get(sample.name, "")
        rows.writerow(
            (sample.path, kind, sample.mask_path or "", "" if dataset.drawn else split, group)
        )
    return "\ufeff" + text.getvalue()


def _plain(place: Path) -> Recognised:
    """Good images alone, unless the folder says otherwise."""
    if list_images(place):
        return Recognised("folder", place, "a folder of images")
    lists = [p for p in sorted(place.glob("*.csv")) if not left_by_system(p.name)]
    if len(lists) == 1:
        return Recognised("csv", lists[0], f"a list of images, {lists[0].name}")
    listed = f", but lists: give one of them, e.g. {lists[0]}" if lists else ""
    give = listed or f"{other_files(place)}; give a folder of good images"
    raise DataError(f"no images in {place}{give}")
