"""`anomaly calibrate`: other thresholds for a trained model, each change on record."""

from __future__ import annotations

import argparse
import logging
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
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
from anomaly.cli.common_options import (
    check_images,
    device_and_threads,
)
from anomaly.cli.logging_setup import ProgressLine
from anomaly.datasets import check_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError, first_of, some
from anomaly.evaluation.recalibrate import (
    HeldOutScores,
    by_hand,
    evaluated_on,
    known_scores,
    score_held_out,
)
from anomaly.evaluation.splits import dataset_of
from anomaly.files.outputs import locked
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import HISTORY, find_model
from anomaly.storage.golden import golden_of, read_record
from anomaly.storage.load import load_model
from anomaly.storage.thresholds import change, replace_thresholds

log = logging.getLogger(__name__)


_RATES = ("false_reject_rate", "review_rate")
_AMOUNTS = ("threshold", "review_threshold")
# What the history records.
_CRITERIA = ("without", "at_most_defective", "data_root", *_RATES, *_AMOUNTS)
_MEANING = {"rejected": "rejected", "caught": "caught, rejected or for review"}
_MOST_DEFECTIVE = 0.2  # share of production images
_FAR = 1.5  # times the highest score of good images, beyond which a threshold is odd


def run(options: argparse.Namespace) -> int:
    """Choose thresholds and write them into the model folder.

    Returns:
        0 done, 3 done without some images that can't be used, 1 the reject threshold would rise by
        more than chance explains, and nothing was written.
    """
    _check(options)
    check_images(options, "good", "production", "defects")
    model = find_model(options.model, exported=False).resolve()
    with locked(model.parent if model.name == "model" else model):  # a run's lock is its model's
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    device, threads = device_and_threads(options)
    model = load_model(options.model, device)
    scored = _score_images(options, model, threads)
    good, defects = _good_scores(options, model, scored), scored.get("defects")
    before = model.thresholds
    unlabelled: ProductionChoice | None = None
    if options.at_most_defective:
        unlabelled = _choose_from_production(options, model, good)
        new, good = unlabelled.thresholds, unlabelled.thresholds.good
    else:
        new = _choose(options, model, good)
    _warn_of_unusual(before, new, good)
    print("\n".join(new.lines()))
    learned = model.manifest["training_images"]
    _report_raised(new, options.model, learned=any(n in learned for n in new.good.names))
    recall = None if defects is None else _print_recall(new, defects)
    exit_code = 3 if any(images.refused for images in scored.values()) else 0
    if any(out.name in learned for out in good.left_out):
        log.info(
            "the model has still learned from the images left out; if they aren't good, remove "
            "them from the training images and train again"
        )
    if before is not None:
        moved = ThresholdChange(before, new)
        print("\n".join(moved.lines()))
        if unlabelled is not None:
            print("\n".join(unlabelled.lines()))
        if "production" in scored:
            _print_effects(options, model, scored, moved, threads)
        if not _agreed(moved, options):
            return 1
    if new == before:
        print("the model already has these thresholds; nothing was changed")
        return exit_code
    criteria = {name: value for name in _CRITERIA if (value := getattr(options, name)) is not None}
    if options.data_root is not None:
        criteria["data_root"] = str(options.data_root)
    images = {name: one.named_hashes() for name, one in scored.items()}
    record = change(criteria, before, new, images, recall)
    model_id = replace_thresholds(options.model, new, record)
    history = find_model(options.model) / HISTORY
    print(
        f"new thresholds saved: model {model.model_id} is now {model_id}; all changes are listed "
        f"in {history}"
    )
    return exit_code


def _agreed(moved: ThresholdChange, options: argparse.Namespace) -> bool:
    """Warn of what is doubtful; whether `--yes`, or a person, agrees to it."""
    if moved.caution:
        log.warning(moved.caution)
    if options.yes or not moved.is_doubtful:
        return True
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("Use the new thresholds anyway? [y/N] ").strip().lower() in ("y", "yes")
    log.error("nothing was changed; leave out images that aren't good (--without), or add --yes")
    return False


def _score_images(
    options: argparse.Namespace, model: Model, threads: int
) -> dict[str, HeldOutScores]:
    """Score the images of `--good` or `--production`, and of `--defects`, by option.

    Raises:
        DataError: an image is given as good and as a defect, or as good and belongs to the test
            split; or none can be used.
    """
    given = {name: getattr(options, name) for name in ("good", "production", "defects")}
    files = {
        name: find_inputs(paths, option=f"--{name}").paths for name, paths in given.items() if paths
    }
    for name, found in files.items():
        if name == "production" and options.at_most_defective:
            continue  # nobody has sorted them, whatever their names say
        check_inputs(given[name], found, defects=name == "defects")
    # Copies under other names are found by their hashes, once all are scored.
    if twice := set(files.get("good", files.get("production", ()))) & set(files.get("defects", ())):
        raise _twice(min(twice))
    instead = ", or name the data set's folder with --data-root"
    tested = evaluated_on(model, options.data_root, instead) if files else frozenset()
    scored: dict[str, HeldOutScores] = {}
    for name, paths in files.items():
        with ProgressLine() as progress:
            scored[name] = score_held_out(
                model,
                paths,
                what=f"--{name}",
                tested=frozenset() if name == "defects" else tested,
                workers=threads,
                progress=partial(progress, name),
            )
        for reason in first_of(scored[name].refused, f" of --{name}"):
            log.warning("skipped: %s", reason)
    defects = set(scored["defects"].named_hashes().values()) if "defects" in scored else set()
    if len(scored) > 1:
        for path, sha256 in next(iter(scored.values())).named_hashes().items():
            if sha256 in defects:
                raise _twice(path)
    return scored


def _twice(path: Path | str) -> DataError:
    return DataError(f"{path} is given as good and as a defect; give it once")


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


def _warn_of_unusual(before: Thresholds | None, new: Thresholds, good: GoodScores) -> None:
    if before is not None and new.label != before.label != "calibrated":
        log.warning("the thresholds %s are replaced by thresholds %s", before.label, new.label)
    highest = max(good.image)
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
    options: argparse.Namespace, model: Model, scored: dict[str, HeldOutScores]
) -> GoodScores:
    if images := scored.get("good", scored.get("production")):
        return images.good_scores().without(options.without or ())
    if model.thresholds is None:
        raise DataError(
            f"{options.model} was trained with --no-calibrate, so it has no scores of good images; "
            "give a folder of good images with --good"
        )
    return known_scores(model, options.without or ())


def _choose(options: argparse.Namespace, model: Model, good: GoodScores) -> Thresholds:
    """The thresholds that were asked for."""
    if options.threshold is not None:
        return by_hand(good, options.threshold, options.review_threshold)
    return thresholds_from(good, *model.rates(options.review_rate, options.false_reject_rate))


def _print_recall(thresholds: Thresholds, defects: HeldOutScores) -> dict[str, Any]:
    """Print how many defects are found, and return these figures for the record.

    Only thresholds by rate are sure not to have been chosen by these defects.
    """
    recalls = {}
    chosen = thresholds.label != "calibrated"
    for what, value in (("rejected", thresholds.image), ("caught", thresholds.review)):
        rate = rate_above(defects.scores, value, chosen=chosen)
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
    if share and by_hand:
        raise AnomalyError("thresholds by hand need images that are known to be good; give --good")


def _choose_from_production(
    options: argparse.Namespace, model: Model, production: GoodScores
) -> ProductionChoice:
    """Thresholds from production images if some of them may be defective."""
    if model.thresholds is None:
        raise DataError(
            f"{options.model} was trained with --no-calibrate, so it has no scores of good images; "
            "give --at-most-defective 0% if all production images are good, or give --good"
        )
    rates = model.rates(options.review_rate, options.false_reject_rate)
    known = known_scores(model)
    return thresholds_from_production(known, production, options.at_most_defective, *rates)


def _print_effects(
    options: argparse.Namespace,
    model: Model,
    scored: Mapping[str, HeldOutScores],
    moved: ThresholdChange,
    threads: int,
) -> None:
    """Print what becomes of the production images, of known defects and of golden parts."""
    given = scored.get("defects")
    defects = given.scores if given else _test_split_defects(options, model, threads)
    for images, done, scores in (
        ("production images", "flagged", scored["production"].scores),
        ("known defects", "caught", defects),
    ):
        if scores:
            before, after = (
                sum(score > limits.review for score in scores)
                for limits in (moved.before, moved.after)
            )
            print(f"of {len(scores)} {images} {before} were {done} before, {after} are now")
    if not defects and moved.after.review > moved.before.review:
        print(
            "no known defects were given, so it isn't known whether they are still flagged; give "
            "--defects FOLDER"
        )
    if golden := golden_of(find_model(options.model).resolve()):
        parts = read_record(golden)["images"]
        passing = [
            name
            for name, part in parts.items()
            if (score := part["image_score"]) is not None
            and moved.after.review >= score > moved.before.review
        ]
        listed = f": {some(passing)}" if passing else ""
        print(f"{len(parts)} golden parts: {len(passing)} were flagged before and pass now{listed}")


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
