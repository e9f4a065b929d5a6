"""`anomaly calibrate`: other thresholds for a trained model, each change on record."""

from __future__ import annotations

import argparse
import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from anomaly.calibration import (
    GoodScores,
    ThresholdChange,
    Thresholds,
    thresholds_from,
)
from anomaly.calibration.production import ProductionChoice, thresholds_from_production
from anomaly.calibration.rates import percent, rate_above
from anomaly.cli.common_options import agreed, ask, check_images, device_and_threads
from anomaly.cli.logging_setup import ProgressLine
from anomaly.cli.options import share_of
from anomaly.datasets import Sample, check_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError, first_of
from anomaly.evaluation.price import (
    DEFECTS,
    PRODUCTION,
    Price,
    compare,
    evaluated_on,
    fresh,
    known_parts,
    price,
)
from anomaly.evaluation.recalibrate import HeldOutScores, by_hand, known_scores, score_held_out
from anomaly.evaluation.splits import content_hash
from anomaly.files.outputs import locked
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import HISTORY, find_model
from anomaly.storage.load import load_model
from anomaly.storage.thresholds import change, earlier_thresholds, replace_thresholds

log = logging.getLogger(__name__)


_RATES = ("false_reject_rate", "review_rate")
_AMOUNTS = ("threshold", "review_threshold")
# What the history records.
_CRITERIA = ("undo", "without", "at_most_defective", "data_root", *_RATES, *_AMOUNTS)
_CHOOSING = ("good", "production", "without", "at_most_defective", *_RATES, *_AMOUNTS)
_MEANING = {"rejected": "rejected", "caught": "caught, rejected or for review"}
_MOST_DEFECTIVE = 0.2  # share of production images
_SHARE = (
    "Look at the images first, those that are flagged now above all. What share of them may be "
    "defective, at most (5% say, 0% if all are good)?"
)
_FAR = 1.5  # times the highest score of good images, beyond which a threshold is odd


def run(options: argparse.Namespace) -> int:
    """Choose thresholds and write them into the model folder.

    Returns:
        0 done, 3 done without some images that can't be used, 1 refused, because known defects that
        are caught now would pass or the reject threshold would rise by more than chance explains;
        nothing was written.
    """
    _check(options)
    check_images(options, "good", "production", "defects")
    model = find_model(options.model, exported=False).resolve()
    with locked(model.parent if model.name == "model" else model):  # a run's lock is its model's
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    device, threads = device_and_threads(options)
    model = load_model(options.model, device)
    given = _given(options)
    defects = given.pop("defects", [])
    known = known_parts([model], evaluated_on(model, options.data_root), defects)
    scored = {
        name: _score(model, name, samples, known, defects, threads)
        for name, samples in given.items()
    }
    new, production, taken = _choose(options, model, known[DEFECTS], scored)
    cost = _cost(model, new, known, scored, threads)
    if not options.undo:
        _warn_of_unusual(model.thresholds, new)
    print("\n".join(new.lines()))
    recall = _print_recall(new, cost, defects)
    _say_learned(model, new)
    doubts = [cost.refusal, *_moved(options, model.thresholds, new)]
    print("\n".join([*(production.lines() if production else ()), *cost.lines()]))
    exit_code = 3 if any(one.refused for one in scored.values()) else 0
    if new == model.thresholds:
        print("the model already has these thresholds; nothing was changed")
        return exit_code
    if not agreed(doubts, options):
        return 1
    images = {name: one.named_hashes() for name, one in scored.items()}
    if production is not None:
        images["taken as defects"] = taken
    if defects:
        images["defects"] = {defect.name: content_hash(defect) for defect in defects}
    _save(options, model, new, images, recall)
    return exit_code


def _cost(
    model: Model,
    new: Thresholds,
    known: Mapping[str, Sequence[Sample]],
    scored: Mapping[str, HeldOutScores],
    workers: int,
) -> Price:
    """The price of other thresholds, for known parts and production images."""
    after = replace(model, thresholds=new)
    with ProgressLine() as progress:
        cost = price(model, after, known, workers=workers, progress=progress)
    if "production" not in scored:
        return cost
    images = scored["production"].images
    compared = compare(images, images, (model.thresholds, new))
    return Price({**cost.compared, PRODUCTION: compared})


def _say_learned(model: Model, new: Thresholds) -> None:
    learned = model.manifest["training_images"]
    if any(out.name in learned for out in new.good.left_out):
        log.info(
            "the model has still learned from the images left out; if they aren't good, remove "
            "them from the training images and train again"
        )


def _moved(
    options: argparse.Namespace, before: Thresholds | None, new: Thresholds
) -> Sequence[str]:
    """Print how the thresholds change; doubts that a person has to agree to."""
    if before is None:
        return ()
    moved = ThresholdChange(before, new)
    print("\n".join(moved.lines()))
    if moved.is_doubtful and not options.undo:
        return [moved.caution]
    if moved.caution:
        log.warning(moved.caution)
    return ()


def _save(
    options: argparse.Namespace,
    model: Model,
    new: Thresholds,
    images: Mapping[str, Mapping[str, str]],
    recall: Mapping[str, Any] | None,
) -> None:
    """Write the thresholds into the model folder, and say how to undo that."""
    criteria = {name: value for name in _CRITERIA if (value := getattr(options, name)) is not None}
    if options.data_root is not None:
        criteria["data_root"] = str(options.data_root)
    record = change(criteria, model.thresholds, new, images, recall)
    model_id = replace_thresholds(options.model, new, record)
    print(
        f"new thresholds saved: model {model.model_id} is now {model_id}; all changes are listed "
        f"in {find_model(options.model) / HISTORY}"
    )
    learned = model.manifest["training_images"]
    _report_raised(new, options.model, learned=any(n in learned for n in new.good.names))
    if model.thresholds is not None:
        log.info("To undo: anomaly calibrate --model %s --undo", shlex.quote(str(options.model)))


def _score(
    model: Model,
    name: str,
    samples: Sequence[Sample],
    known: Mapping[str, Sequence[Sample]],
    defects: Sequence[Sample],
    workers: int,
) -> HeldOutScores:
    """Score the images of the option `name` that aren't known otherwise."""
    unsorted = name == "production"
    kept = fresh(model, samples, f"--{name}", known, defects=defects, unsorted=unsorted)
    with ProgressLine() as progress:
        scored = score_held_out(model, kept, workers=workers, progress=partial(progress, name))
    for reason in first_of(scored.refused, f" of --{name}"):
        log.warning("skipped: %s", reason)
    return scored


def _given(options: argparse.Namespace) -> dict[str, list[Sample]]:
    """The images of `--good` or `--production`, and of `--defects`, by option.

    Raises:
        DataError: names of folders or files contradict what they are given as.
    """
    samples = {}
    for name in ("good", "production", "defects"):
        if paths := getattr(options, name):
            found = find_inputs(paths, option=f"--{name}").paths
            # Nobody has sorted production images, whatever their names say.
            if not (name == "production" and options.at_most_defective):
                check_inputs(paths, found, defects=name == "defects")
            samples[name] = [Sample(path, str(path)) for path in found]
    return samples


def _report_raised(thresholds: Thresholds, model: Path, *, learned: bool) -> None:
    """Say which good images raise the reject threshold, and how they are left out of it.

    Args:
        thresholds: new ones.
        model: the run or model folder.
        learned: whether the model has learned from these images.
    """
    raised = thresholds.raised_lines()
    if not raised:
        return
    for line in raised:
        log.info(line)
    out = [image.name for image in thresholds.good.left_out]  # or they would count again
    names = shlex.join([*out, *(name for name, _, _ in thresholds.raised_by())])
    log.info(
        "leaving out these images lowers only the threshold; the model has still learned from "
        "them, and defects like them may pass:"
        if learned
        else "look at the images that raise it; if they aren't good:"
    )
    log.info("  anomaly calibrate --model %s --without %s", shlex.quote(str(model)), names)


def _warn_of_unusual(before: Thresholds | None, new: Thresholds) -> None:
    if before is not None and new.label != before.label != "calibrated":
        log.warning("the thresholds %s are replaced by thresholds %s", before.label, new.label)
    highest = max(new.good.image)
    if new.label == "by hand" and new.image > _FAR * highest > 0:
        log.warning(
            "the threshold %.4g is %.1f times the highest score of the good images, %.4g: "
            "defects that score below the threshold will pass",
            new.image,
            new.image / highest,
            highest,
        )


def _check(options: argparse.Namespace) -> None:
    """Refuse options that don't go together, before anything is loaded."""
    if options.undo and any(getattr(options, name) for name in _CHOOSING):
        raise AnomalyError("--undo brings the previous thresholds back; leave other options out")
    by_rate = options.false_reject_rate is not None or options.review_rate is not None
    by_hand = options.threshold is not None or options.review_threshold is not None
    if by_hand and by_rate:
        raise AnomalyError("thresholds are either set by hand or found by rates; give one of these")
    if by_hand and options.threshold is None:
        raise AnomalyError("--review-threshold needs --threshold; give both")
    _check_production(options, by_hand=by_hand)
    for name in (*_RATES, *_AMOUNTS):
        value = getattr(options, name)
        if value is None or (0 < value < 1 if name in _RATES else 0 <= value < math.inf):
            continue
        legal = "between 0 and 1 (0.01 is 1 %)" if name in _RATES else "a number of 0 or more"
        raise AnomalyError(f"--{name.replace('_', '-')} is {value:g}; it must be {legal}")


def _good_scores(
    options: argparse.Namespace,
    model: Model,
    known: Sequence[Sample],
    scored: Mapping[str, HeldOutScores],
) -> GoodScores:
    if images := scored.get("good", scored.get("production")):
        return images.good_scores().without(options.without or ())
    if model.thresholds is None:
        raise DataError(
            f"{options.model} was trained with --no-calibrate, so it has no scores of good images; "
            "give a folder of good images with --good"
        )
    return known_scores(model, known, options.without or ())


def _choose(
    options: argparse.Namespace,
    model: Model,
    defects: Sequence[Sample],
    scored: Mapping[str, HeldOutScores],
) -> tuple[Thresholds, ProductionChoice | None, dict[str, str]]:
    """The thresholds asked for.

    If some production images may be defective, also how these were taken into account, and the
    sha256, by name, of those that count as defects.
    """
    if options.undo:
        return earlier_thresholds(model.history, find_model(options.model) / HISTORY), None, {}
    if options.at_most_defective:
        production = scored["production"].good_scores()
        choice = _choose_from_production(options, model, defects, production)
        out = {name for name, _ in choice.left_out}
        taken = {name: sha256 for name, _, _, sha256 in production.rows() if name in out}
        return choice.thresholds, choice, taken
    good = _good_scores(options, model, defects, scored)
    if options.threshold is not None:
        return by_hand(good, options.threshold, options.review_threshold), None, {}
    rates = model.rates(options.review_rate, options.false_reject_rate)
    return thresholds_from(good, *rates), None, {}


def _print_recall(
    thresholds: Thresholds, cost: Price, defects: Sequence[Sample]
) -> dict[str, Any] | None:
    """Print how many of the given defects are found; these figures for the record, None if none.

    Only thresholds by rate are sure not to have been chosen by these defects.
    """
    names = {defect.name for defect in defects}
    scores = [image.scores[1] for image in cost.of(DEFECTS) if image.name in names]
    if not scores:
        return None
    recalls = {}
    chosen = thresholds.label != "calibrated"
    for what, value in (("rejected", thresholds.image), ("caught", thresholds.review)):
        rate = rate_above(scores, value, chosen=chosen)
        print(
            f"of {rate.images} defects {rate.count} {_MEANING[what]}: "
            f"{100 * rate.count / rate.images:.1f} %, "
            f"{100 * rate.low:.1f} to {100 * rate.high:.1f} % (95 % confidence)"
        )
        recalls[what] = asdict(rate)
    return recalls


def _check_production(options: argparse.Namespace, *, by_hand: bool) -> None:
    """Refuse options that don't go with unsorted production images."""
    share = options.at_most_defective
    if options.production and share is None and (answer := ask(_SHARE)):
        try:
            share = options.at_most_defective = share_of(answer)
        except argparse.ArgumentTypeError as error:
            raise AnomalyError(str(error)) from None
    if bool(options.production) != (share is not None):
        raise AnomalyError(
            "--production and --at-most-defective need each other: look at the images, those that "
            "are flagged now first, and give the largest share of them that may be defective"
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
    if share and by_hand:
        raise AnomalyError("thresholds by hand need images that are known to be good; give --good")


def _choose_from_production(
    options: argparse.Namespace, model: Model, defects: Sequence[Sample], production: GoodScores
) -> ProductionChoice:
    """Thresholds from production images if some of them may be defective."""
    if model.thresholds is None:
        raise DataError(
            f"{options.model} was trained with --no-calibrate, so it has no scores of good images; "
            "give --at-most-defective 0% if all production images are good, or give --good"
        )
    rates = model.rates(options.review_rate, options.false_reject_rate)
    known = known_scores(model, defects)
    return thresholds_from_production(known, production, options.at_most_defective, *rates)
