"""A folder that someone has -> what kind of data set it is, by its layout alone."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anomaly.datasets.layouts import (
    KNOWN_LAYOUTS,
    folders_in,
    meant_by,
    says_good,
    says_masks,
    says_not_good,
)
from anomaly.datasets.masks import Masks, strays
from anomaly.datasets.samples import GOOD, Dataset
from anomaly.errors import DataError, nearest
from anomaly.files.writing import at_home, like
from anomaly.imaging.listing import is_folder, list_images, other_files


@dataclass(frozen=True)
class Recognised:
    """What a folder is taken for.

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


def recognise(place: Path, layout: str | None = None) -> tuple[Recognised, ...]:
    """What a folder, or a list of images, can be taken for; the likeliest first.

    Args:
        place: as a user named it.
        layout: takes it for that one, whatever it looks like.

    Raises:
        DataError: it doesn't exist, holds several data sets or no images.
        AnomalyError: its `~` stands for nobody's home folder.
    """
    place = Path(os.path.abspath(at_home(place)))  # noqa: PTH100, links stay
    if not place.exists():
        raise DataError(f"{place} doesn't exist{like(place)}; give a folder of images")
    if layout is not None:
        return (Recognised(layout, place, "as you say"),)
    if not is_folder(place):
        if place.suffix.lower() != ".csv":
            raise DataError(f"{place} is a file; give the folder that it is in, or a CSV list")
        return (Recognised("csv", place, "a list of images"),)
    known = tuple(Recognised(k.name, place, k.reason) for k in KNOWN_LAYOUTS if k.fits(place))
    if not known:
        _check_whole(place)
    return known or (_own_names(place) or _plain(place),)


def _check_whole(place: Path) -> None:
    """Refuse a part of a data set that isn't its good images, such as `test` or `test/scratch`.

    Raises:
        DataError: it is one.
    """
    if says_good(place.name) or place.name == "train":
        return
    for around in (place.parent, place.parent.parent):
        for known in KNOWN_LAYOUTS:
            if known.name != "visa" and known.fits(around):
                raise DataError(
                    f"{place} is a part of {around}, which looks like a data set of its own "
                    f"({known.name}: {known.reason}); give {around}, or say --format folder where "
                    f"all images in {place} are good"
                )


def _own_names(place: Path) -> Recognised | None:
    """Folders of good images and of others under names of one's own: a list is made of them."""
    folders = folders_in(place)
    good = [name for name in folders if says_good(name)]
    if not good:
        return None
    masks = [name for name in folders if says_masks(name)]
    left = [name for name in folders if name not in good and name not in masks]
    others = [name for name in left if list_images(place / name)]  # no runs, no notes
    if not others:
        root = place / good[0] if len(good) == 1 else place
        return Recognised("folder", root, f"good images in {', '.join(good)}")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("path", "label", "mask"))
    finder = Masks()
    for folder in [*good, *others]:
        for image in list_images(place / folder):
            inner = image.relative_to(place / folder)
            kind = inner.parts[0] if len(inner.parts) > 1 else folder
            if meant_by(kind) != kind or kind == GOOD:  # `ng/0`, `ng/good`: taken for good ones
                kind = f"{folder} {kind}" if len(inner.parts) > 1 else f"folder {kind}"
            places = [p for m in masks for p in (place / m / folder, place / m)]
            candidates = (finder.of(image, p / inner.parent) for p in places)
            mask = next(filter(None, candidates), None)  # that of a good image marks nothing
            rows.writerow((image, *((GOOD, "") if folder in good else (kind, mask or ""))))
    reason = f"good images in {', '.join(good)}, others in {', '.join(others)}"
    if masks:
        reason += f", their masks in {', '.join(masks)}"
        if unused := strays([file for m in masks for file in finder.left_in(place / m)]):
            reason += f" ({unused})"
    # Marked as UTF-8, so that the bytes of names that are none are kept.
    return Recognised("csv", place, reason, "\ufeff" + text.getvalue())


def with_copies_together(dataset: Dataset, copies: Iterable[Sequence[str]]) -> str:
    """The lines of a list of a data set's images in which copies are one part's views.

    Args:
        dataset: whose split is drawn.
        copies: names of images that show the same.
    """
    part = {name: f"copies of {names[0]}" for names in copies for name in names}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("path", "label", "mask", "group"))
    for sample in (*dataset.train, *dataset.test):
        kind = sample.defect_type
        if sample.is_defect and meant_by(kind) != kind:
            kind = f"folder {kind}"
        group = sample.group or part.get(sample.name, sample.name)
        rows.writerow((sample.path, kind, sample.mask_path or "", group))
    return "\ufeff" + text.getvalue()


def _plain(place: Path) -> Recognised:
    """Good images alone, unless the folder says otherwise."""
    inside = folders_in(place)
    sets = [name for name in inside if any(k.fits(place / name) for k in KNOWN_LAYOUTS)]
    if sets:
        raise DataError(
            f"{place} holds several data sets: {', '.join(sets[:8])}"
            f"{' …' if len(sets) > 8 else ''}; give one of them, e.g. {place / sets[0]}"
        )
    if any(says_not_good(name) for name in inside):
        raise DataError(
            f"{place} has folders of defects or tests ({', '.join(inside[:8])}), but none that is "
            "named as good; rename the folder of good parts to `good`, or give it alone"
        )
    lists = sorted(place.glob("*.csv"))
    if len(lists) == 1 and not list_images(place):
        return Recognised("csv", lists[0], f"a list of images, {lists[0].name}")
    if not list_images(place):
        listed = f", but lists: give one of them, e.g. {lists[0]}" if lists else ""
        give = listed or f"{other_files(place)}; give a folder of good images"
        raise DataError(f"no images in {place}{give}")
    unclear = [name for name in inside if list_images(place / name)]
    if len(unclear) > 1 and not any(image.parent == place for image in list_images(place)):
        raise DataError(
            f"{place} has folders whose names don't say which images are good "
            f"({', '.join(unclear[:8])}). Rename the folder of good parts to `good`. If all "
            "folders hold good parts, add --format folder"
        )
    return Recognised("folder", place, "good images alone")


def chosen(candidates: tuple[Recognised, ...], ask: Callable[[str], str] | None) -> Recognised:
    """One of what a folder can be taken for.

    Args:
        candidates: as `recognise` gave them.
        ask: shows a question and returns the answer, or raises EOFError; None where there is no one
            to ask.

    Raises:
        DataError: several fit and there is no one to ask, or the answer names none of them.
    """
    if len(candidates) == 1:
        return candidates[0]
    listed = ", ".join(f"{c.layout} ({c.reason})" for c in candidates)
    untold = DataError(f"{candidates[0].root} can be {listed}; say which with --format")
    if ask is None:
        raise untold
    try:
        answer = ask(
            f"{candidates[0].root} can be {listed}. Which? [{candidates[0].layout}] "
        ).strip()
    except EOFError:  # Ctrl-D
        raise untold from None
    by_name = {c.layout: c for c in candidates}
    if answer and answer not in by_name:
        raise DataError(f"{answer!r} isn't one of them; {nearest(answer, by_name)}")
    return by_name[answer or candidates[0].layout]
