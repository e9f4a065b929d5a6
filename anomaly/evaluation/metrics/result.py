"""What a measurement returns: numbers, and a reason wherever there is none."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metrics:
    """Named figures of one evaluation.

    Attributes:
        values: the figures; None where the data leave one undefined.
        reasons: for each None in `values`, why.
        error_bounds: how far a binned figure can lie from the exact one, at most. A figure
            that isn't named here is exact.
    """

    values: dict[str, float | None]
    reasons: dict[str, str] = field(default_factory=dict)
    error_bounds: dict[str, float] = field(default_factory=dict)

    def __or__(self, other: Metrics) -> Metrics:
        """Both sets of figures; those of `other` win where a name is in both."""
        kept = {name: why for name, why in self.reasons.items() if name not in other.values}
        sharp = {name: e for name, e in self.error_bounds.items() if name not in other.values}
        return Metrics(self.values | other.values, kept | other.reasons, sharp | other.error_bounds)

    def only(self, name: str) -> Metrics:
        """One of the figures."""
        reasons = {name: self.reasons[name]} if name in self.reasons else {}
        bounds = {name: self.error_bounds[name]} if name in self.error_bounds else {}
        return Metrics({name: self.values[name]}, reasons, bounds)

    @classmethod
    def undefined(cls, names: tuple[str, ...], reason: str) -> Metrics:
        """All of `names` undefined for one reason."""
        return cls(dict.fromkeys(names), dict.fromkeys(names, reason))
