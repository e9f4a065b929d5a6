"""Where exactly a threshold is put, so that no rounding moves a verdict.

The batch that a score is computed in, threads, processor and runtime move its last digits: by less
than 10⁻⁶ of it where that was measured (docs/reproducibility.md), and 10⁻⁴ is allowed for. bfloat16
in place of float32 moves it by up to 0.6 %. A threshold that sits on a score would decide by them.
"""

from __future__ import annotations

import numpy as np

from anomaly.calibration.rates import Floats

# All relative to the scores. Half a gap is one and a half times the noise of 1e-4.
GAP = 3e-4
# Above a score where the gap is wider: ten times the noise, and of no weight beside the width of a
# distribution of scores.
ROOM = 1e-3
# Above the highest score, or below the lowest: another precision, too, leaves all of them there.
OUTSIDE = 1e-2
# Among many thousands of scores none of the nearest gaps may be as wide. No threshold goes
# farther than this to find one.
REACH = 1e-2


def placed(value: float, scores: Floats, room: float = ROOM) -> float:
    """A threshold in a gap between scores, at or above a value.

    Taken is the lowest gap of `GAP` or more that begins at most `REACH` above the highest score up
    to `value`, or the widest of them if none is so wide. The threshold lies `room` above its lower
    end, and never beyond its middle. So it flags as many of the scores as `value` does, or a few
    less. Beyond both ends of the scores it keeps `OUTSIDE` from them.

    Args:
        value: a score above it was to be flagged.
        scores: (n,) finite, at least one, in any order.
        room: infinite for the middle of the gap.

    Returns:
        The threshold, a float32 wherever the gap holds one.
    """
    known = np.unique(scores)
    reached = int(np.searchsorted(known, value, side="right"))
    if reached == 0:
        return _single(known[0] - OUTSIDE * _size(known[0]), -np.inf, known[0])
    start = known[reached - 1]
    last = int(np.searchsorted(known, start + REACH * _size(start), side="right"))
    below = known[reached - 1 : last]
    above = known[reached : last + 1]
    if len(above) < len(below):  # the highest score is within reach
        above = np.append(above, np.inf)
    widths = (above - below) / np.maximum(np.abs(below), 1e-30)
    wide = widths >= GAP
    at = int(np.argmax(wide) if wide.any() else np.argmax(widths))
    size = _size(below[at])
    step = OUTSIDE * size if np.isinf(above[at]) else min((above[at] - below[at]) / 2, room * size)
    return _single(below[at] + step, below[at], above[at])


def _size(score: float) -> float:
    """Its magnitude; not quite 0 for 0, so that there is room beside it in single precision."""
    return max(abs(float(score)), 1e-30)


def _single(value: float, below: float, above: float) -> float:
    """A value strictly between two, as float32 if that lies between them too."""
    single = float(np.float32(value))
    return single if below < single < above else float(value)
