"""A folder that someone has -> what kind of data set it is, by its layout alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anomaly.datasets.layouts import (
    folders_in,
    labels_in,
    layout_of,
    say_folder,
    sorted_by_names,
)
from anomaly.datasets.masks import plain
from anomaly.datasets.names import CLEAR, Label, label_of, split_of
from anomaly.datasets.samples import Dataset, Sample
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
    if known := layout_of(place):
        if {label_of(name) for name in folders_in(place)} & CLEAR:
            raise DataError(
                f"{place} can be {known.name} ({known.title}) or good_defect (folders by their "
                "names); choose one with --format"
            )
        return Recognised(known.name, place, f"{' and '.join(known.needed)}, as {known.title}")
    if is_folder(place.parent / "split_csv"):
        return Recognised("visa", place, "a category beside split_csv")
    _check_whole(place)
    return _own_names(place, ask) or _plain(place)


def _check_whole(place: Path) -> None:
    """Refuse several data sets, and a part of one that isn't its good images, such as `test`.

    Raises:
        DataError: it is one.
    """
    if sets := [n for n in folders_in(place) if not split_of(n) and layout_of(place / n)]:
        raise DataError(
            f"{place} holds several data sets: {some(sets, most=8)}; give one of them, e.g. "
            f"{place / sets[0]}"
        )
    if label_of(place.name) is Label.GOOD or place.name == "train":
        return
    for around in (place.parent, place.parent.parent):
        if known := layout_of(around):
            raise DataError(
                f"{place} is a part of {around}, which looks like a data set of its own "
                f"({known.title}); give {around}, or add --format folder if all images in {place} "
                "are good"
            )


def _own_names(place: Path, ask: Callable[[str], str] | None) -> Recognised | None:
    """Folders whose names say what they hold; None where none does."""
    labels = labels_in(place)
    if set(labels.values()) <= {Label.UNKNOWN, Label.ASIDE}:
        return None
    answers: dict[Path, Label] = {}
    if ask is not None:
        open_ = [i for i, label in labels.items() if label in (Label.UNKNOWN, Label.UNCLEAR)]
        known = {p for i in labels.keys() - set(open_) for p in (i, *i.parents)}
        # Once for all folders in one that holds none of a clear name.
        outer = {
            i: next((p for p in (*reversed(i.parents), i) if p not in known), i) for i in open_
        }
        answered = {top: _answer(place / top, ask) for top in dict.fromkeys(outer.values())}
        answers = {inner: answered[top] for inner, top in outer.items()}
    good = [inner for inner, label in (labels | answers).items() if label is Label.GOOD]
    if not good and (Label.DEFECTIVE in labels.values() or answers):
        raise _no_good(place, [say_folder(inner) for inner in labels])
    samples, _ = sorted_by_names(place, answers)
    defects = (s.path.parent.relative_to(place).as_posix() for _, s in samples if s.is_defect)
    others = list(dict.fromkeys(defects))
    reason = f"good images in {some([i.as_posix() for i in good], most=8)}"
    if others:
        reason += f", others in {some(others, most=8)}"
    if answers:
        return Recognised("csv", place, reason, _listing(samples))
    tops = {inner.parts[0] for inner in good}
    if not others and Label.ASIDE not in labels.values() and not any(s for s, _ in samples):
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


def _listing(samples: Sequence[tuple[str, Sample]]) -> str:
    """A list of samples; marked as UTF-8, so that the bytes of names that are none are kept."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("path", "label", "mask", "split", "group"))
    for split, sample in samples:
        kind = sample.defect_type
        if sample.is_defect:  # `0`, and what somebody has said is one
            kinds = (kind, f"defect {kind}", "defect")
            kind = next(k for k in kinds if label_of(k) is Label.DEFECTIVE)
        rows.writerow((sample.path, kind, sample.mask_path or "", split, sample.group or ""))
    return "\ufeff" + text.getvalue()


def with_copies_together(dataset: Dataset, copies: Iterable[Sequence[str]]) -> str:
    """The lines of a list of a data set's images in which copies are views of one part.

    Args:
        dataset: whose split is drawn.
        copies: names of images that show the same.
    """
    part = {name: f"copies of {names[0]}" for names in copies for name in names}
    samples = [*dataset.train, *dataset.test]
    return _listing([("", replace(s, group=s.group or part.get(s.name))) for s in samples])


def _no_good(place: Path, folders: Sequence[str]) -> DataError:
    return DataError(
        f"{place} has folders of defects or tests ({some(folders, most=8)}), but none that is "
        "named as good. Put the good images into a folder `good`, or give their folder alone"
    )


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
