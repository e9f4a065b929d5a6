"""A folder that someone has -> what kind of data set it is, by its layout alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anomaly.datasets.layouts import (
    folders_in,
    labels_in,
    open_by_names,
    say_folder,
)
from anomaly.datasets.masks import plain
from anomaly.datasets.names import CLEAR, Label, label_of, split_of
from anomaly.datasets.samples import Dataset
from anomaly.errors import DataError, some
from anomaly.files.outputs import left_by_system
from anomaly.files.writing import at_home, like
from anomaly.imaging.listing import is_folder, list_images, other_files

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
