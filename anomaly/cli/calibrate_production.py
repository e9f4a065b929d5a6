"""`anomaly calibrate --production`: thresholds from images that nobody has sorted."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.calibration.production import thresholds_from_production
from anomaly.calibration.rates import percent
from anomaly.cli.logging_setup import ProgressLine
from anomaly.errors import AnomalyError, DataError, some
from anomaly.evaluation.recalibrate import known_scores, score_held_out
from anomaly.evaluation.splits import dataset_of
from anomaly.storage.folder import find_model
from anomaly.storage.golden import golden_of, read_record

if TYPE_CHECKING:
    from anomaly.calibration import GoodScores, ThresholdChange
    from anomaly.calibration.production import ProductionChoice
    from anomaly.evaluation.recalibrate import HeldOutScores
    from anomaly.scoring.pipeline import Model

_MOST_DEFECTIVE = 0.2


def check(options: argparse.Namespace, *, by_hand: bool, by_cost: bool) -> None:
    """Refuse options that don't go with unsorted production images."""
    share = options.at_most_defective
    if bool(options.production) != (share is not None):
        raise AnomalyError(
            "--production and --at-most-defective need each other: give both, with the share of "
            "production images that may be defective (e.g. 5%, or 0% if all are good)"
        )
    if share is None:
        return
    if options.good:
        raise AnomalyError(
            "thresholds come either from --good or from --production images; give one of these"
        )
    if not 0 <= share <= _MOST_DEFECTIVE:
        raise AnomalyError(
            f"--at-most-defective is {percent(share)}; it must be from 0 % to "
            f"{percent(_MOST_DEFECTIVE)}. Beyond that, sort the images: give --good and --defects"
        )
    if share and (by_hand or by_cost):
        raise AnomalyError(
            "thresholds by hand or by cost need images that are known to be good; give --good"
        )


def choose(options: argparse.Namespace, model: Model, production: GoodScores) -> ProductionChoice:
    """Thresholds from production images if some of them may be defective."""
    if model.thresholds is None:
        raise DataError(
            f"{options.model} was trained with --no-calibrate, so it has no scores of good images; "
            "give --at-most-defective 0% if all production images are good, or give --good"
        )
    rates = model.rates(options.review_rate, options.false_reject_rate)
    known = known_scores(model)
    return thresholds_from_production(known, production, options.at_most_defective, *rates)


def print_effects(
    options: argparse.Namespace,
    model: Model,
    scored: Mapping[str, HeldOutScores],
    moved: ThresholdChange,
    threads: int,
) -> None:
    """Print what becomes of the production images, of known defects and of golden parts."""
    defects = scored.get("defects")
    known = defects.scores if defects else _test_split_defects(options, model, threads)
    for line in _effects(moved, scored["production"].scores, known, options.model):
        print(line)


def _test_split_defects(options: argparse.Namespace, model: Model, threads: int) -> Sequence[float]:
    """The scores of the defects of the test split that a model is evaluated on, if there are any.

    What hinders is said where good images are kept apart from the test split.
    """
    what = "defects of the test split"
    with suppress(AnomalyError), ProgressLine() as shown:
        test = dataset_of(model, options.model, options.data_root).test
        if defects := [sample.path for sample in test if sample.is_defect]:
            progress = partial(shown, what)
            return score_held_out(
                model, defects, what=what, tested=(), workers=threads, progress=progress
            ).scores
    return ()


def _effects(
    moved: ThresholdChange, scores: Sequence[float], defects: Sequence[float], folder: Path
) -> Iterator[str]:
    """What other thresholds would have changed: of production images, known defects and parts."""
    for images, done, values in (
        ("production images", "flagged", scores),
        ("known defects", "caught", defects),
    ):
        if values:
            before, after = (
                sum(score > limits.review for score in values)
                for limits in (moved.before, moved.after)
            )
            yield f"of {len(values)} {images} {before} were {done} before, {after} are now"
    if not defects and moved.after.review > moved.before.review:
        yield (
            "no known defects were given, so it isn't known whether they are still flagged; give "
            "--defects FOLDER"
        )
    if golden := golden_of(find_model(folder).resolve()):
        parts = read_record(golden)["images"]
        passing = [
            name
            for name, part in parts.items()
            if (score := part["image_score"]) is not None
            and moved.after.review >= score > moved.before.review
        ]
        listed = f": {some(passing)}" if passing else ""
        yield f"{len(parts)} golden parts: {len(passing)} were flagged before and pass now{listed}"
