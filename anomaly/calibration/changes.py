"""Thresholds in the place of others: how far they move, and which good images move them."""

from __future__ import annotations

from dataclasses import dataclass

from anomaly.calibration.model_thresholds import Thresholds
from anomaly.errors import some

# Times the reject threshold so far, above which a new one is reported as higher. Less is never
# doubted: the interval of a threshold from few images hangs on one or two gaps between scores.
_FAR = 1.1


@dataclass(frozen=True, eq=False)
class ThresholdChange:
    """A change of thresholds: those before and after.

    Attributes:
        before: the thresholds so far.
        after: the new ones.
    """

    before: Thresholds
    after: Thresholds

    @property
    def is_doubtful(self) -> bool:
        """Whether the reject threshold rises by more than chance explains, and nobody chose so.

        Defects among the good images do that; all defects like them would then pass.
        """
        chance = max(self.before.reject_up_to, _FAR * self.before.image)
        return self.after.label != "by hand" and self.after.image > chance

    def lines(self) -> list[str]:
        """Lines for people: how far the thresholds move, and which image sets them."""
        if self.after == self.before:
            return []
        both = (
            ("review", self.before.review, self.after.review),
            ("reject", self.before.image, self.after.image),
        )
        moved = [f"{name} threshold {old:.4g} -> {new:.4g}" for name, old, new in both]
        lines = [", ".join(moved)]
        by_rank = self.after.label == "calibrated" and self.after.calibration.reject.target
        if by_rank and self.after.image != self.before.image:
            name, score = self.after.decisive
            lines.append(f"the reject threshold is set by the score of {name} ({score:.4g})")
        return lines

    @property
    def caution(self) -> str:
        """A warning if the reject threshold rises by far; empty otherwise."""
        if self.after.image <= _FAR * self.before.image:
            return ""
        above = self._above()
        look = (
            f"Rejected before: {len(above)} of {self.after.images} good images ({some(above)}). "
            "Look at them: if they are defects, defects like them will pass"
            if above
            else "No good image scored above the earlier threshold"
        )
        chance = f" (by chance up to {self.before.reject_up_to:.4g})" if self.is_doubtful else ""
        return (
            f"the reject threshold rises from {self.before.image:.4g} to "
            f"{self.after.image:.4g}{chance}; images that score between these are no longer "
            f"rejected. {look}"
        )

    def _above(self) -> list[str]:
        """The good images above the earlier reject threshold, the highest first."""
        good = self.after.good
        rows = sorted(zip(good.image, good.names, strict=True), reverse=True)
        return [f"{name}: {score:.4g}" for score, name in rows if score > self.before.image]
