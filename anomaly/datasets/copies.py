"""Images that show the same: exact copies, near copies, and what labels say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from anomaly.datasets.samples import Sample
from anomaly.errors import DataError
from anomaly.imaging.looks import Look

# Root mean square of the difference of two thumbnails, in levels of 255. JPEG of a quality of 40
# and more and noise of 5 levels stay below; the closest different parts of 8 data sets are at 0.87.
_NEAR = 0.6
_AT_ONCE = 1024


def contradiction(one: Sample, other: Sample) -> DataError | None:
    """The error that two samples of one picture can't both be right; None where they can.

    Args:
        one: of a picture.
        other: of the same picture.
    """
    if one.is_defect == other.is_defect:
        return None
    good, defect = (other, one) if one.is_defect else (one, other)
    return DataError(
        f"{defect.path} is labelled as a defect ({defect.defect_type}), but is the same picture as "
        f"{good.path}, which is labelled good; look at them and remove the wrong one"
    )


def frames(looks: Mapping[int, Look]) -> dict[int, int]:
    """The image that stands for the frame that each one shows, whatever its compression and noise.

    Args:
        looks: of images by their numbers.

    Returns:
        By image the lowest number of those that show its frame; its own where no other does.
    """
    # Exact copies are of one frame however rounding goes.
    first: dict[str, int] = {}
    for image in sorted(looks):
        first.setdefault(looks[image].picture, image)
    distinct = [*first.values()]
    groups: dict[int, list[int]] = {}
    for place, leader in enumerate(_leaders([looks[i].thumbnail for i in distinct])):
        groups.setdefault(leader, []).append(distinct[place])
    shown = {image: min(group) for group in groups.values() for image in group}
    return {image: shown[first[look.picture]] for image, look in looks.items()}


def _leaders(thumbnails: Sequence[NDArray[np.float16]]) -> list[int]:
    """The place of a thumbnail, for each one, that it is close to: its own for the first.

    Along the direction in which they differ most, close ones are neighbours. Only these are
    compared, so that hundreds of thousands take seconds.
    """
    if not thumbnails:
        return []
    rows = np.stack(thumbnails).astype(np.float32)
    rows -= rows.mean(axis=0)
    along = rows @ np.linalg.eigh(rows.T @ rows)[1][:, -1]
    order = np.argsort(along, kind="stable")
    rows, along = rows[order], along[order]
    squares, most = np.square(rows).sum(axis=1), float(_NEAR * rows.shape[1] ** 0.5)
    leader = np.arange(len(rows))
    for start in range(0, len(rows), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(rows))
        until = int(np.searchsorted(along, along[stop - 1] + most, side="right"))
        products = rows[start:stop] @ rows[start:until].T
        close = squares[start:stop, None] + squares[start:until] - 2 * products < most**2
        for place in range(start, stop):
            if leader[place] == place:
                others = place + 1 + np.flatnonzero(close[place - start, place + 1 - start :])
                leader[others[leader[others] == others]] = place
    found = np.empty_like(leader)
    found[order] = order[leader]
    return [int(place) for place in found]


def near_copies(samples: Mapping[int, Sample], looks: Mapping[int, Look]) -> str:
    """That some training images are near copies of others; empty where none is.

    Exact copies aren't counted.

    Args:
        samples: by their numbers.
        looks: of the same numbers.
    """
    shown = frames(looks)
    met: dict[int, dict[str, int]] = {}
    for i, look in sorted(looks.items()):
        met.setdefault(shown[i], {}).setdefault(look.picture, i)
    alike = [[*pictures.values()] for pictures in met.values() if len(pictures) > 1]
    if not alike:
        return ""
    one, other = (samples[i].path for i in alike[0][:2])
    return (
        f"{sum(map(len, alike)) - len(alike)} of {len(looks)} training images are near copies of "
        f"others, different only in noise or compression ({other} of {one}), which leaves "
        f"{len(met)} different images. Copies teach nothing and make thresholds too optimistic: "
        "photograph more parts instead"
    )


def too_few_different(count: int) -> DataError:
    """The error of so many different images, none or one: too few to find thresholds with."""
    return DataError(
        f"calibration needs at least 2 different training images, not {count}; "
        "add some, or train with --no-calibrate (and without model.leave_out_suspects, if set)"
    )


def none_usable(reasons: Sequence[str]) -> DataError:
    """The error to raise if no image can be used.

    Args:
        reasons: of each, beginning with its path.
    """
    listed = "\n  ".join(reasons[:3])
    return DataError(f"none of the {len(reasons)} images can be used:\n  {listed}")
