"""A folder that someone has -> what kind of data set it is, by its layout alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anomaly.datasets.annotations import check_annotations, files_around
from anomaly.datasets.by_names import labels_in, say_folder, sorted_by_names
from anomaly.datasets.labels import Label, label_of, split_of
from anomaly.datasets.layouts import (
    KNOWN_LAYOUTS,
    folders_in,
)
from anomaly.datasets.masks import plain
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
    known = [Recognised(k.name, place, k.reason) for k in KNOWN_LAYOUTS if k.fits(place)]
    if len(known) > 1:
        fitting = ", ".join(f"{k.layout} ({k.reason})" for k in known)
        raise DataError(f"{place} can be {fitting}; choose one with --format")
    if known and known[0].layout != "good_defect":
        return known[0]
    if not known:
        _check_whole(place)
        _check_one(place)
    return _own_names(place, ask) or _plain(place)


def _check_whole(place: Path) -> None:
    """Refuse a part of a data set that isn't its good images, such as `test` or `test/scratch`.

    Raises:
        DataError: it is one.
    """
    if label_of(place.name) is Label.GOOD or place.name == "train":
        return
    for around in (place.parent, place.parent.parent):
        for known in KNOWN_LAYOUTS:
            if known.name != "visa" and known.fits(around):
                raise DataError(
                    f"{place} is a part of {around}, which looks like a data set of its own "
                    f"({known.name}: {known.reason}); give {around}, or add --format folder if all "
                    f"images in {place} are good"
                )


def _check_one(place: Path) -> None:
    """Refuse a folder of several data sets."""
    sets = [
        name
        for name in folders_in(place)
        if not split_of(name) and any(k.fits(place / name) for k in KNOWN_LAYOUTS)
    ]
    if sets:
        raise DataError(
            f"{place} holds several data sets: {', '.join(sets[:8])}"
            f"{' …' if len(sets) > 8 else ''}; give one of them, e.g. {place / sets[0]}"
        )


def _own_names(place: Path, ask: Callable[[str], str] | None) -> Recognised | None:
    """Folders whose names say what they hold; None where none does."""
    labels = labels_in(place)
    if set(labels.values()) <= {Label.UNKNOWN, Label.ASIDE}:
        return None
    open_ = [i for i, label in labels.items() if label in (Label.UNKNOWN, Label.UNCLEAR)]
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
        raise _no_good(place, [say_folder(inner) for inner in labels])
    samples, _ = sorted_by_names(place, answers)
    masks = [inner.as_posix() for inner, label in labels.items() if label is Label.ASIDE]
    others = dict.fromkeys(
        s.path.parent.relative_to(place).as_posix() for _, s in samples if s.is_defect
    )
    reason = f"good images in {some([i.as_posix() for i in good], most=8)}"
    if others:
        reason += f", others in {some(list(others), most=8)}"
    if any(sample.mask_path for _, sample in samples):
        reason += f", their masks {f'in {some(masks)}' if masks else 'beside them'}"
    if answers:
        return Recognised("csv", place, reason, _listing(samples))
    tops = {inner.parts[0] for inner in good}
    if not others and not masks and not any(split for split, _ in samples):
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
    images = list_images(place)
    check_annotations(images, files_around(place))
    inside = folders_in(place)
    if any(label_of(name) in (Label.DEFECTIVE, Label.ASIDE) for name in inside):
        raise _no_good(place, inside)
    lists = [p for p in sorted(place.glob("*.csv")) if not left_by_system(p.name)]
    if len(lists) == 1 and not images:
        return Recognised("csv", lists[0], f"a list of images, {lists[0].name}")
    if not images:
        listed = f", but lists: give one of them, e.g. {lists[0]}" if lists else ""
        give = listed or f"{other_files(place)}; give a folder of good images"
        raise DataError(f"no images in {place}{give}")
    tops = [image.relative_to(place).parts for image in images]
    unclear = sorted({parts[0] for parts in tops if len(parts) > 1})
    if len(unclear) > 1 and all(len(parts) > 1 for parts in tops):
        raise DataError(
            f"{place} has folders whose names don't say which images are good "
            f"({', '.join(unclear[:8])}). Rename the folder of good parts to `good`. If all "
            "folders hold good parts, add --format folder"
        )
    return Recognised("folder", place, "a folder of images")
