"""What good images score under a model: what thresholds are found with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from anomaly.calibration.rates import percent, supported_rate
from anomaly.errors import DataError

_FOR_THE_REST = (
    "The rates hold for parts like the images that remain; if parts like those left out are good "
    "and occur again, more good parts will be flagged"
)


class LeftOut(NamedTuple):
    """A good image left out by hand.

    Attributes:
        place: among all images, those left out included.
        name: of the image.
        image: its image score.
        peak: the highest value of its anomaly map.
        sha256: of its file; empty where it isn't known here.
    """

    place: int
    name: str
    image: float
    peak: float
    sha256: str = ""


# Name, image score, peak and sha256 of an image.
Row: TypeAlias = tuple[str, float, float, str]


@dataclass(frozen=True)
class GoodScores:
    """Scores of good images by models that haven't learned them.

    Attributes:
        names: of the n images.
        image: their image scores.
        peak: the highest value of each one's anomaly map.
        source: how many they are and how they were had, for people.
        groups: from how many groups (lots, or parts seen more than once) the images come; None
            where none are known.
        left_out: images that somebody has taken out.
        hashes: sha256 of each of the n images, empty for one of which it isn't known here; none at
            all after training, whose images' hashes the model's manifest has by name.
        stood_out: how many images training has left out because they stood out from all others.
    """

    names: tuple[str, ...] = field(repr=False)
    image: tuple[float, ...] = field(repr=False)
    peak: tuple[float, ...] = field(repr=False)
    source: str
    groups: int | None = None
    left_out: tuple[LeftOut, ...] = ()
    hashes: tuple[str, ...] = field(default=(), repr=False)
    stood_out: int = 0

    def rows(self) -> list[Row]:
        """A row for each image; the sha256 is empty if unknown."""
        hashes = self.hashes or ("",) * len(self.names)
        return list(zip(self.names, self.image, self.peak, hashes, strict=True))

    def with_rows(self, rows: Sequence[Row]) -> GoodScores:
        """A copy with other rows, at least one."""
        names, image, peak, hashes = zip(*rows, strict=True)
        return replace(
            self,
            names=names,
            image=image,
            peak=peak,
            hashes=hashes if any(hashes) else (),
        )

    def without(self, names: Sequence[str]) -> GoodScores:
        """A copy without some images, which are kept as left out; all others count.

        Args:
            names: of images, or the ends of their paths where only one image has that end.

        Raises:
            DataError: no image, or more than one, has such a name, or none would be left.
        """
        rows = self.rows()
        for image in self.left_out:
            rows.insert(image.place, image[1:])
        places = {_place(name, [row[0] for row in rows]) for name in names}
        if len(places) == len(rows):
            raise DataError("all good images would be left out; a threshold needs some of them")
        kept = [row for i, row in enumerate(rows) if i not in places]
        out = tuple(LeftOut(i, *rows[i]) for i in sorted(places))
        source = re.sub(rf"^{len(self.names)}\b", str(len(kept)), self.source)
        return replace(self.with_rows(kept), left_out=out, source=source)

    def joined(self, other: GoodScores) -> GoodScores:
        """These scores and others together; images left out stay so unless the others hold them.

        An image that both have counts once, with the other's score. Where groups are known of
        either, all images of the one of which none are count as one.
        """
        known = self.groups is not None or other.groups is not None
        shared = {*other.hashes} - {""}
        rows = [row for row in self.rows() if row[3] not in shared]
        out = tuple(image for image in self.left_out if image.sha256 not in shared)
        count = len(rows) + len(out)
        moved = tuple(image._replace(place=count + image.place) for image in other.left_out)
        return replace(
            self.with_rows(rows + other.rows()),
            groups=(self.groups or 1) + (other.groups or 1) if known else None,
            left_out=out + moved,
            stood_out=self.stood_out + other.stood_out,
        )

    @property
    def cautions(self) -> list[str]:
        """Limits of what the bounds hold for, a sentence each; empty if that is all images."""
        cautions = [] if self.groups is None else [self._caution_of_groups(self.groups)]
        if self.stood_out:
            cautions.append(
                "left out because they look unlike all others (model.leave_out_suspects): "
                f"{self.stood_out}. {_FOR_THE_REST}"
            )
        if self.left_out:
            names = ", ".join(image.name for image in self.left_out)
            cautions.append(f"left out by hand: {len(self.left_out)} ({names}). {_FOR_THE_REST}")
        return cautions

    def _caution_of_groups(self, groups: int) -> str:
        count = "one group" if groups == 1 else f"{groups} groups"
        if groups > 1 and self.left_out:  # of which groups isn't kept
            count += " at most"
        return (
            f"the images come from {count}. Images of one group may be alike, so the bounds count "
            f"groups. {count} can't guarantee a false-reject rate below "
            f"{percent(supported_rate(groups))}"
        )


def _place(wanted: str, names: Sequence[str]) -> int:
    """The index of an image, by its name, the end of it, or a path that ends with it."""
    path = "/" + wanted.replace("\\", "/")
    places = [i for i, name in enumerate(names) if name == wanted] or [
        i for i, name in enumerate(names) if f"/{name}".endswith(path) or path.endswith(f"/{name}")
    ]
    if len(places) != 1:
        what = f"{len(places)} good images are" if places else "no good image is"
        raise DataError(
            f"{what} called {wanted}; calibration.json in the model's folder lists their names"
        )
    return places[0]
