"""Data set and settings -> the settings that catch more of the known defects. `anomaly tune`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from anomaly.calibration.rates import percent
from anomaly.config.schema import NAMED_DIGITS, Config
from anomaly.datasets import Dataset, Sample, open_dataset
from anomaly.errors import DataError, counted
from anomaly.files.tables import text_table
from anomaly.files.writing import as_json, write
from anomaly.runtime.devices import device_of
from anomaly.scoring.build import flatten, to_dict
from anomaly.training.fit import StageProgress
from anomaly.training.tuning.candidates import POSE, TURNS, Change, changed, expense
from anomaly.training.tuning.judging import LEAST_DEFECTS, Floats, Judgement, Scores, judge, worth
from anomaly.training.tuning.search import Search, Skipped, Tried, usable
from anomaly.training.tuning.trials import Images

_HEAD = ("settings", "defects caught", "good flagged", "spread", "ms", "MB")


@dataclass(frozen=True, eq=False, repr=False)
class Tuning:
    """What `anomaly.tune` returns.

    Attributes:
        base: the settings that were there.
        tried: all settings that were tried, these first.
        skipped: those that weren't, and why.
        scores: of each that was tried, of the images that all of them score.
        judgement: which of them, and what is to be expected of them.
        images: sha256 of the images that chose, by name.
    """

    base: Config
    tried: tuple[Tried, ...]
    skipped: tuple[Skipped, ...]
    scores: tuple[Scores, ...]
    judgement: Judgement
    images: dict[str, str]

    def __repr__(self) -> str:
        return f"<Tuning of {self.base.name}: {self.reason}>"

    @property
    def config(self) -> Config:
        """The chosen settings, to train with; they name the images that chose them."""
        known = tuple(sorted(sha256[:NAMED_DIGITS] for sha256 in self.images.values()))
        config = changed(self.base, self.tried[self.judgement.index].changes)
        named: dict[str, Any] = {"name": f"{self.base.name}_tuned"}
        if known:
            named["chosen_by"] = known
        return config.model_copy(update=named)

    @property
    def reason(self) -> str:
        """The reason for the choice, in a sentence or two."""
        defects, parts = len(self.scores[0].defects), self.judgement.parts
        if not defects:
            return self._without_defects()
        if parts < LEAST_DEFECTS:
            return (
                f"your settings stay: known defects on {counted(parts, 'part')} are too few to "
                f"compare settings; give at least {LEAST_DEFECTS} defective parts, better 20"
            )
        first, chosen = self.caught(0), self.caught(self.judgement.index)
        if self.judgement.better:
            chance = max(self.judgement.chance, 1e-3)
            return (
                f"use {self.name(self.judgement.index)}: it catches {chosen} of {defects} "
                f"known defects, your settings catch {first}. If all {len(self.tried)} settings "
                "tried were alike, one would gain as much in "
                f"{'less than ' if chance == 1e-3 else ''}{round(1000 * chance)} of 1,000 cases. "
                "Of settings that catch about as many, the cheapest in use is chosen"
            )
        best = max(range(len(self.tried)), key=self._success)
        if self.caught(best) <= first:
            return "your settings stay: no other settings catch more"
        return (
            f"your settings stay: the best other settings, {self.name(best)}, catch "
            f"{self.caught(best)} of {defects} known defects and yours catch {first}; "
            "that may be chance, and more known defects would tell"
        )

    def lines(self) -> list[str]:
        """The table, the choice and what to expect of it, for people."""
        rate = percent(self.base.calibration.review_rate)
        lines = text_table(self._rows())
        defects = len(self.scores[0].defects)
        if defects:
            lines += [
                f"defects caught: if {rate} of all good images are flagged",
                "good flagged: good test images above the threshold that training finds",
            ]
        lines.append(
            "spread: how many times the median the highest 5 % of good images score; ms: time for "
            "an image; MB: size of the model"
        )
        if self.skipped:
            lines += [f"not tried: {self._told(s.changes)}: {s.why}" for s in self.skipped]
        lines += ["", self.reason]
        if defects:
            caught, flagged = self.judgement.caught, self.judgement.flagged
            chosen = "settings and threshold" if self.judgement.better else "the threshold"
            lines.append(
                f"expect of new parts: {caught.count} of {caught.images} defects caught "
                f"({caught.interval}), {flagged.count} of {flagged.images} good images flagged "
                f"({flagged.interval}; 95 % confidence). To measure this, a fifth of the parts at "
                f"a time was left out, and the others chose {chosen}"
            )
        return lines

    def name(self, index: int) -> str:
        """Name of tried settings: what they change."""
        return self._told(self.tried[index].changes)

    def caught(self, index: int) -> int:
        """Known defects that settings catch at the promised rate of good parts for review."""
        scores = self.scores[index]
        return int((scores.defects > scores.limit(self.base.calibration.review_rate)).sum())

    def write(self, file: Path) -> None:
        """Write the chosen settings as YAML, and all figures as JSON beside it.

        Raises:
            OutputError: there is no room, or no right to.
        """
        config = self.config
        values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        head = "".join(f"# {line}\n" for line in ("Written by `anomaly tune`.", self.reason))
        body = yaml.safe_dump(values, allow_unicode=True, sort_keys=False, width=100)
        write(file, head + body)
        write(file.with_suffix(".json"), as_json(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {
            "chosen": self.name(self.judgement.index),
            "reason": self.reason,
            "better": self.judgement.better,
            "chance": self.judgement.chance,
            "cross_fitted": {
                "caught": vars(self.judgement.caught),
                "flagged": vars(self.judgement.flagged),
            },
            "tried": [
                {
                    "changes": self._differences(tried.changes),
                    "caught": self.caught(i),
                    "worth": float(worth(self.scores[i], self.base.calibration.review_rate).sum()),
                    "review_threshold": tried.trial.thresholds.review.value,
                    "reject_threshold": tried.trial.thresholds.reject.value,
                    "held_out": self.scores[i].held_out.tolist(),
                    "defects": _plain(self.scores[i].defects),
                    "good": _plain(self.scores[i].good),
                    "seconds": dict(tried.trial.seconds),
                    "image_milliseconds": 1000 * tried.trial.image_seconds,
                    "model_bytes": tried.trial.bank_bytes,
                }
                for i, tried in enumerate(self.tried)
            ],
            "not_tried": {self._told(s.changes): s.why for s in self.skipped},
            "images": self.images,
        }

    def _rows(self) -> list[tuple[str, ...]]:
        """Table rows: header, present settings, and the best image score of each step."""
        best: dict[tuple[Change, ...], int] = {}
        for i, tried in enumerate(self.tried):
            best[tried.step] = max(best.get(tried.step, i), i, key=self._success)
        shown = dict.fromkeys([0, *best.values(), self.judgement.index])
        rows: list[tuple[str, ...]] = [_HEAD]
        for i in shown:
            trial, defects, good = self.tried[i].trial, self.scores[i].defects, self.scores[i].good
            flagged = int((good > trial.thresholds.review.value).sum())
            rows.append(
                (
                    self.name(i),
                    f"{self.caught(i)} of {len(defects)}" if len(defects) else "",
                    f"{flagged} of {len(good)}" if len(good) else "",
                    f"{spread(self.scores[i]):.2f}",
                    f"{1000 * trial.image_seconds:.0f}",
                    f"{trial.bank_bytes / 1e6:.1f}",
                )
            )
        return rows

    def _without_defects(self) -> str:
        height, width = self.tried[0].trial.patch_pixels
        turned = [
            i for i, t in enumerate(self.tried) if any(c.axis in (POSE, TURNS) for c in t.changes)
        ]
        narrowest = min(turned, key=lambda i: spread(self.scores[i]), default=0)
        before, after = spread(self.scores[0]), spread(self.scores[narrowest])
        poses = (
            f" Good images differ less with {self.name(narrowest)} (spread {after:.2f} instead of "
            f"{before:.2f}): too few training images show how parts can lie."
            if after < 0.9 * before
            else ""
        )
        return (
            "your settings stay: comparing settings needs known defects. Good images show this: "
            f"one patch covers {height:.0f} × {width:.0f} pixels, so smaller defects may not be "
            f"seen; 5 % of good images score {before:.2f} times the median or more.{poses} Give "
            "known defects with --defects FOLDER"
        )

    def _success(self, index: int) -> tuple[int, float]:
        """The known defects that settings catch, and what these and the others are worth."""
        rate = self.base.calibration.review_rate
        return self.caught(index), float(worth(self.scores[index], rate).sum())

    def _differences(self, changes: Sequence[Change]) -> dict[str, Any]:
        before = dict(flatten(to_dict(self.base)))
        after = dict(flatten(to_dict(changed(self.base, changes))))
        return {key: value for key, value in after.items() if value != before.get(key)}

    def _told(self, changes: Sequence[Change]) -> str:
        different = self._differences(changes)
        return ", ".join(f"{key}={value}" for key, value in different.items()) or "your settings"


def _plain(scores: Floats) -> list[float | None]:
    """Scores for JSON, which has no infinity: None for an image with a reason for review."""
    return [score if math.isfinite(score) else None for score in scores.tolist()]


def spread(scores: Scores) -> float:
    """Ratio of the 95 % quantile to the median of good images' scores; 1 if all are alike."""
    return float(np.quantile(scores.held_out, 0.95) / max(np.median(scores.held_out), 1e-30))


def tune(
    config: Config,
    data: Dataset | None = None,
    *,
    defects: Sequence[Sample] | None = None,
    good: Sequence[Sample] | None = None,
    budget: float = 600.0,
    device: str | torch.device = "auto",
    say: Callable[[str], None] = lambda text: None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Tuning:
    """Try settings that matter, and choose those that catch more of the known defects.

    Each is trained on the training images, with thresholds as `fit` finds them. Settings replace
    those that are there only where they catch more beyond chance; of those that can't be told
    apart, the cheapest. The chosen config names the images that chose it.

    Args:
        config: the settings that are there.
        data: what to learn from, and known defects and other good images in its test split; by
            default the data set that `config.data` names.
        defects: known defects, in place of the data set's.
        good: good images that aren't learned from, in place of the data set's.
        budget: seconds; what won't fit isn't tried. The settings that are there are tried in any
            case.
        device: `auto` (the GPU where there is one), `cpu`, `cuda`, or a torch device.
        say: called with what is worth knowing on the way.
        progress: called with (stage, done, total).

    Raises:
        DataError: there are too few training images.
        AnomalyError: the settings that are there can't be trained.
    """
    if data is None:
        data = open_dataset(config.data.format, config.data.root, config.data.category)
    tested = [*data.test, *data.validation]
    images = Images(
        tuple(data.train),
        tuple([s for s in tested if s.is_defect] if defects is None else defects),
        tuple([s for s in tested if not s.is_defect] if good is None else good),
    )
    with tempfile.TemporaryDirectory(prefix="anomaly-") as scratch:
        search = Search(config, images, budget, device_of(device), Path(scratch), say, progress)
        search.run()
    known = [*images.defects, *images.good]
    rate = config.calibration.review_rate
    common = usable(search.tried)
    scores = tuple(tried.trial.scores.only(common) for tried in search.tried)
    if images.defects and not len(scores[0].defects):
        raise DataError("none of the known defects can be used; `anomaly check` says why")
    costs = [_cost(config, tried) for tried in search.tried]
    groups = [sample.group for sample, used in zip(images.every, common, strict=True) if used]
    return Tuning(
        config,
        tuple(search.tried),
        tuple(search.skipped),
        scores,
        judge(scores, costs, rate, config.seed, groups),
        {known[i].name: sha256 for i, sha256 in search.hashes.items()},
    )


def _cost(base: Config, tried: Tried) -> float:
    """Relative cost of settings, plus a trifle for each changed value."""
    values = sum(len(change.values) for change in tried.changes)
    return expense(tried.trial.config, base) + 0.001 * values
