"""`anomaly calibrate`: other thresholds for a trained model, each change on record."""

from __future__ import annotations

import argparse
import json
import logging
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly import __version__
from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine
from anomaly.errors import AnomalyError, DataError

if TYPE_CHECKING:
    from anomaly.calibration import GoodScores, Rate, Thresholds
    from anomaly.checkpoint import Model

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the run's folder, or its model/ folder")
    add("--good", type=Path, help="good images that the model hasn't learned from")
    add("--defects", type=Path, help="images of defects, to say how many are found")
    rates = parser.add_argument_group("by rates (default: those that the model has)")
    add = rates.add_argument
    add("--false-reject-rate", type=float, metavar="R", help="good parts that may be rejected")
    add("--review-rate", type=float, metavar="R", help="good parts that may not be called good")
    costs = parser.add_argument_group("by cost (needs --defects)")
    add = costs.add_argument
    add("--cost-escape", type=float, metavar="C", help="of passing a defective part")
    add("--cost-false-reject", type=float, metavar="C", help="of rejecting a good one")
    add("--defect-share", type=float, metavar="P", default=0.01, help="on the line (default 0.01)")
    hand = parser.add_argument_group("by hand")
    add = hand.add_argument
    add("--threshold", type=float, metavar="X", help="reject above this image score")
    add("--review-threshold", type=float, metavar="Y", help="review above this (default: X)")
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Choose thresholds and write them into the model folder."""
    _check(options)
    import torch

    from anomaly.checkpoint import load
    from anomaly.threshold_files import replace_thresholds

    device, threads = machine.settle(options)
    assert isinstance(device, torch.device)
    model = load(options.model, device)
    images = _Images(model, _test_images(options.model), threads)
    good = _good(options, model, images)
    defects = None if options.defects is None else images.score("--defects", options.defects)
    new = _choose(options, model, good, None if defects is None else defects.image)

    for line in new.lines():
        print(line)
    found = None if defects is None else _say_recall(new, defects)
    before = model.detector.thresholds
    if new == before:
        print("these are the thresholds that the model has; nothing was changed")
        return 3 if images.refused else 0
    record = _record(options, before, new, images.hashes, found)
    model_id = replace_thresholds(options.model, new, record)
    print(f"model {model.model_id} is now {model_id}; the change is in its history.jsonl")
    return 3 if images.refused else 0


def _check(options: argparse.Namespace) -> None:
    by_rate = options.false_reject_rate is not None or options.review_rate is not None
    by_cost = options.cost_escape is not None or options.cost_false_reject is not None
    by_hand = options.threshold is not None or options.review_threshold is not None
    if by_hand and (by_rate or by_cost):
        raise AnomalyError("thresholds are set by hand or found by rates or costs, not both")
    if by_cost and options.false_reject_rate is not None:
        raise AnomalyError("--false-reject-rate and costs both set the reject threshold; give one")
    if by_hand and options.threshold is None:
        raise AnomalyError("--review-threshold needs --threshold, where rejection begins")
    if by_cost and None in (options.cost_escape, options.cost_false_reject, options.defects):
        raise AnomalyError("costs need all of --cost-escape, --cost-false-reject and --defects")
    for name in ("false_reject_rate", "review_rate", "defect_share"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1:
            flag = name.replace("_", "-")
            raise AnomalyError(f"--{flag} is {value:g}; it must lie between 0 and 1 (0.01 is 1 %)")
    for name in ("threshold", "review_threshold", "cost_escape", "cost_false_reject"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            flag = name.replace("_", "-")
            raise AnomalyError(f"--{flag} is {value:g}; it must be a number of 0 or more")


@dataclass
class _Images:
    """Scores folders of images, and remembers what they held.

    Attributes:
        model: scores them.
        forbidden: sha256 of each image of the test split.
        threads: for decoding.
    """

    model: Model
    forbidden: frozenset[str]
    threads: int

    def __post_init__(self) -> None:
        self.hashes: dict[str, dict[str, str]] = {}
        self.refused = 0

    def score(self, option: str, folder: Path) -> GoodScores:
        """The scores of a folder's images.

        Raises:
            DataError: none can be used, or one belongs to the test split.
        """
        import numpy as np

        from anomaly.calibration import GoodScores
        from anomaly.loading import Refused
        from anomaly.results import find_inputs

        paths = find_inputs([folder], option)
        learned = set(self.model.manifest["training_images"].values())
        rows: dict[int, tuple[float, float]] = {}
        hashes: dict[str, str] = {}
        known = 0
        with ProgressLine() as progress:
            for result in self.model.detector.predict(paths, workers=self.threads):
                if isinstance(result, Refused):
                    log.warning("skipped: %s", result.reason)
                    self.refused += 1
                    continue
                sha256 = result.image.sha256
                if sha256 in self.forbidden:
                    raise DataError(
                        f"{paths[result.index]} belongs to the test split that the model is "
                        "evaluated on, which no threshold may see; give other images"
                    )
                if sha256 in learned:
                    known += 1
                    continue
                peak = float(np.nanmax(result.anomaly_map()))
                rows[result.index] = (result.image_score, peak)
                hashes[str(paths[result.index])] = sha256
                progress("scoring", len(rows), len(paths))
        if known:
            log.warning("skipped %d images that the model has learned from", known)
        if not rows:
            raise DataError(f"{option} {folder}: none of its {len(paths)} images can be used")
        self.hashes[option.removeprefix("--")] = hashes
        order = sorted(rows)
        return GoodScores(
            names=tuple(paths[i].relative_to(folder).as_posix() for i in order)
            if folder.is_dir()
            else (folder.name,),
            image=tuple(rows[i][0] for i in order),
            peak=tuple(rows[i][1] for i in order),
            source=f"{len(order)} good images that the model hasn't learned from",
        )


def _good(options: argparse.Namespace, model: Model, images: _Images) -> GoodScores:
    if options.good is not None:
        return images.score("--good", options.good)
    if model.detector.thresholds is None:
        raise DataError(
            f"{options.model} was trained with --no-calibrate and knows no scores of good images; "
            "give --good with a folder of some"
        )
    return model.detector.thresholds.good


def _choose(
    options: argparse.Namespace,
    model: Model,
    good: GoodScores,
    defects: tuple[float, ...] | None,
) -> Thresholds:
    from anomaly.calibration import (
        Calibration,
        cheapest_threshold,
        threshold_at,
        threshold_for_false_reject_rate,
        thresholds_from,
        with_pixels,
    )

    if options.threshold is not None:
        review = options.threshold if options.review_threshold is None else options.review_threshold
        if review > options.threshold:
            raise AnomalyError(
                f"--review-threshold {review:g} lies above --threshold {options.threshold:g}"
            )
        both = Calibration(
            threshold_at(review, good.image), threshold_at(options.threshold, good.image)
        )
        return with_pixels(both, "by hand", good)
    review_rate, reject_rate = _rates(options, model)
    if options.cost_escape is None or defects is None:
        return thresholds_from(good, review_rate, reject_rate)
    choice = cheapest_threshold(
        good.image,
        defects,
        false_reject_cost=options.cost_false_reject,
        escape_cost=options.cost_escape,
        defect_share=options.defect_share,
    )
    print(f"cheapest: {choice.cost:.4g} a part, with {options.defect_share:.2%} of parts defective")
    review = threshold_for_false_reject_rate(good.image, review_rate)
    if review.value > choice.threshold.value:
        review = choice.threshold
    return with_pixels(Calibration(review, choice.threshold), "by cost", good)


def _rates(options: argparse.Namespace, model: Model) -> tuple[float, float]:
    """Rates of review and of rejection: those given, else the model's, else the config's."""
    config = model.detector.config.calibration
    now = model.detector.thresholds
    review = (now and now.calibration.review.target) or config.review_rate
    reject = (now and now.calibration.reject.target) or config.reject_rate
    review, reject = options.review_rate or review, options.false_reject_rate or reject
    if reject <= review:
        return review, reject
    if options.review_rate is not None and options.false_reject_rate is not None:
        raise AnomalyError(
            f"--false-reject-rate {reject:g} is above --review-rate {review:g}; what is rejected "
            "is never called good"
        )
    # Only one was given: the other gives way.
    return (review, review) if options.review_rate is not None else (reject, reject)


def _say_recall(thresholds: Thresholds, defects: GoodScores) -> dict[str, Rate]:
    from dataclasses import asdict

    from anomaly.calibration import recall_at

    said = {}
    for what, value in (("rejected", thresholds.image), ("not called good", thresholds.review)):
        rate = recall_at(value, defects.image)
        print(
            f"of {rate.images} defects {rate.count} {what}: {rate.expected:.1%}, "
            f"{rate.low:.1%} to {rate.high:.1%} with 95% confidence"
        )
        said[what] = asdict(rate)
    return said  # type: ignore[return-value]


def _record(
    options: argparse.Namespace,
    before: Thresholds | None,
    after: Thresholds,
    hashes: dict[str, dict[str, str]],
    found: Any,
) -> dict[str, Any]:
    asked = {
        name: value
        for name, value in vars(options).items()
        if name not in ("command", "model", "device", "threads") and value is not None
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "software_version": __version__,
        "asked": {k: str(v) if isinstance(v, Path) else v for k, v in asked.items()},
        "before": None if before is None else before.to_json(),
        "after": after.to_json(),
        "images": hashes,
        "defects_found": found,
    }


def _test_images(folder: Path) -> frozenset[str]:
    """Hashes of the test split, where the run remembers its data set and it is still there."""
    import hashlib

    from anomaly.images import list_images

    for file in (folder / "train.json", folder.absolute().parent / "train.json"):
        try:
            test = Path(json.loads(file.read_text("utf-8"))["data_folder"]) / "test"
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if test.is_dir():
            return frozenset(
                hashlib.sha256(image.read_bytes()).hexdigest() for image in list_images(test)
            )
    return frozenset()
