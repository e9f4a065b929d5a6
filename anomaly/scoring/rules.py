"""Zones and rules: where a marked region lies, how large it is, and what that means.

Imports no torch. A zone with a rate of its own has an image score of its own, see
`anomaly.scoring.pipeline`; rules come after the score, on images that it flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from anomaly.imaging.geometry import AnyView
from anomaly.imaging.region import Region
from anomaly.maps.regions import MarkedRegion

_SEVERITY = ("good", "review", "reject")
_AND = ", "  # which no name of a zone holds


def decider(decided_by: str) -> str:
    """What decided, by its name as in `rule scratch` or `zone seal`: `rule`, `zone` or nothing."""
    return decided_by.partition(" ")[0]


@dataclass(frozen=True, eq=False)
class Zone:
    """A named part of the image.

    Attributes:
        name: of the zone.
        region: where it is.
        reject_rate: the share of good parts that may be rejected for it; None where it is judged
            with the rest of the image.
    """

    name: str
    region: Region
    reject_rate: float | None = None

    def holds(self, region: MarkedRegion, view: AnyView) -> bool:
        """Whether a region's highest place lies in the zone."""
        x, y = region.peak_x, region.peak_y
        if view.pose is not None:
            point = view.pose.in_part(np.array((x + 0.5, y + 0.5)))
            x, y = np.floor(point).astype(int).tolist()
        height, width = view.source
        inside = 0 <= x < width and 0 <= y < height
        return inside and bool(self.region.inside(view.source, slice(y, y + 1))[0, x])


@dataclass(frozen=True)
class Rule:
    """The verdict of regions with at least these sizes, in a zone.

    Attributes:
        name: of the rule.
        verdict: `good`, `review` or `reject`.
        zone: where a region's highest place lies; None for anywhere.
        sizes: the smallest `area`, `length` and `thickness`, as far as they are given, in the
            photograph's pixels.
        count: with fewer such regions, the rule decides none of them.
    """

    name: str
    verdict: str
    zone: str | None
    sizes: tuple[tuple[str, float], ...]
    count: int = 1

    def fits(self, region: MarkedRegion) -> bool:
        """Whether a region fits the rule."""
        if self.zone is not None and self.zone not in region.zone.split(_AND):
            return False
        return all(getattr(region, name) >= least for name, least in self.sizes)


@dataclass(frozen=True, eq=False)
class Judge:
    """Decides on regions by rules and zones.

    Attributes:
        zones: by which regions are placed.
        rules: of each region, the first that fits decides.
    """

    zones: tuple[Zone, ...] = ()
    rules: tuple[Rule, ...] = ()

    def placed(self, regions: Sequence[MarkedRegion], view: AnyView) -> tuple[MarkedRegion, ...]:
        """Regions with the zones that they lie in, and the rule that decides each."""
        decided = [
            replace(r, zone=_AND.join(z.name for z in self.zones if z.holds(r, view)))
            for r in regions
        ]
        for rule in self.rules:
            fitting = [i for i, r in enumerate(decided) if not r.rule and rule.fits(r)]
            if len(fitting) >= rule.count:
                for i in fitting:
                    decided[i] = replace(decided[i], rule=rule.name)
        return tuple(decided)

    def verdict(
        self, by_score: str, regions: Sequence[MarkedRegion], *, beyond: bool = False
    ) -> tuple[str, str]:
        """The worst verdict of an image's regions.

        Args:
            by_score: the image's verdict by its score, which regions have that no rule decides.
            regions: as `placed` gave them.
            beyond: whether the score is of more than regions, so that its verdict stands at least.

        Returns:
            The verdict, and the rule that decided; empty where the score did.
        """
        verdicts = {rule.name: rule.verdict for rule in self.rules}
        present = {r.rule for r in regions}
        if beyond or not regions:
            present.add("")
        worst = max((verdicts.get(name, by_score) for name in present), key=_SEVERITY.index)
        if "" in present and worst == by_score:
            return by_score, ""
        name = next(n for n, v in verdicts.items() if n in present and v == worst)
        return worst, name


NO_RULES = Judge()
