"""What the model's own thresholds did: counts of verdicts, escapes and false rejects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class VerdictCounts:
    """How many images got each verdict."""

    good: int = 0
    review: int = 0
    reject: int = 0

    @property
    def total(self) -> int:
        """Images with any verdict."""
        return self.good + self.review + self.reject


@dataclass(frozen=True)
class Confusion:
    """Verdicts against the truth.

    Attributes:
        good: verdicts on good images.
        defective: verdicts on defective images.
        by_type: verdicts by defect type, in the order of first appearance; good images have the
            type they were given.
    """

    good: VerdictCounts
    defective: VerdictCounts
    by_type: dict[str, VerdictCounts]

    @property
    def escapes(self) -> int:
        """Defective images that passed as good."""
        return self.defective.good

    @property
    def false_rejects(self) -> int:
        """Good images that were rejected; those sent to review don't count."""
        return self.good.reject


def confusion(
    verdicts: Sequence[str], labels: Sequence[bool], defect_types: Sequence[str]
) -> Confusion:
    """Count verdicts by truth and by defect type.

    Args:
        verdicts: n of `good`, `review`, `reject`.
        labels: n, True for defective images.
        defect_types: n names, as the data set gives them.

    Raises:
        ValueError: lengths differ, or a verdict is none of the three.
    """
    unknown = sorted(set(verdicts) - {"good", "review", "reject"})
    if unknown:
        raise ValueError(f"a verdict is 'good', 'review' or 'reject', not {unknown[0]!r}")
    counts = Counter(zip(map(bool, labels), defect_types, verdicts, strict=True))
    return Confusion(
        good=_counted({key: n for key, n in counts.items() if not key[0]}),
        defective=_counted({key: n for key, n in counts.items() if key[0]}),
        by_type={
            name: _counted({key: n for key, n in counts.items() if key[1] == name})
            for name in dict.fromkeys(defect_types)
        },
    )


def _counted(counts: dict[tuple[bool, str, str], int]) -> VerdictCounts:
    by_verdict: Counter[str] = Counter()
    for (_, _, verdict), n in counts.items():
        by_verdict[verdict] += n
    return VerdictCounts(**by_verdict)
