"""`anomaly missed`: what would have caught defects that a model called good."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.calibration.rates import percent
from anomaly.cli.common_options import device_and_threads
from anomaly.cli.logging_setup import ProgressLine
from anomaly.datasets.inputs import find_inputs
from anomaly.datasets.masks import without_masks
from anomaly.errors import AnomalyError, DataError, ImageError
from anomaly.evaluation.weaknesses import Run
from anomaly.files.outputs import locked
from anomaly.storage.folder import find_model
from anomaly.storage.golden import MISSED, keep_missed
from anomaly.storage.load import load_model
from anomaly.training.runs import training_record

if TYPE_CHECKING:
    from anomaly.explain.missed import MissedDefect
    from anomaly.scoring.pipeline import Model

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Explain missed defects, try other settings, and keep the defects if asked.

    Returns:
        0 done, 3 done without some images that can't be used.
    """
    with nullcontext() if options.output is None else locked(options.output):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    paths = without_masks(find_inputs(options.images, option="IMAGE").paths)
    if options.mask is not None and len(paths) > 1:
        raise AnomalyError(f"--mask takes one image, not {len(paths)}; give one")
    folder = find_model(options.model, exported=False)
    from anomaly.explain.missed import explain_missed
    from anomaly.training.update import unique_names

    device, threads = device_and_threads(options)
    model = load_model(folder, device)
    missed: list[MissedDefect] = []
    refused: list[AnomalyError] = []
    for path, name in zip(paths, unique_names([p.stem for p in paths], ()), strict=True):
        try:
            defect = explain_missed(model, path, mask=options.mask, good=options.good)
        except (ImageError, DataError) as error:
            if model.thresholds is None or len(paths) == 1:
                raise
            log.warning("skipped: %s", error)
            refused.append(error)
            continue
        print("\n".join(defect.lines()))
        if options.output is not None:
            defect.explanation.save(options.output / name, overwrite=options.overwrite)
            print(f"Look at {options.output / name / 'explanation.html'}")
        if not defect.caught:
            missed.append(defect)
            if options.keep:
                print(f"kept as {keep_missed(folder, path.name, path.read_bytes())}")
    if len(refused) == len(paths):
        raise DataError(f"none of {len(paths)} images can be used: {refused[0]}")
    if missed:
        _try_others(options, model, [defect.image for defect in missed], threads)
        _what_next(options, model, folder, missed)
    return 3 if refused else 0


def _try_others(
    options: argparse.Namespace, model: Model, images: Sequence[Path], threads: int
) -> None:
    from anomaly.explain.other_settings import OverBudgetError, other_settings, settings_table

    try:
        with ProgressLine() as progress:
            tried = other_settings(
                model,
                images,
                good=options.good,
                budget=options.budget,
                workers=threads,
                progress=progress,
            )
    except (DataError, OverBudgetError) as error:
        log.warning("other settings weren't tried: %s", error)
        return
    print("\nOther settings, tried on the model's features:")
    print("\n".join(settings_table(tried)))


def _what_next(
    options: argparse.Namespace, model: Model, folder: Path, missed: Sequence[MissedDefect]
) -> None:
    """Print the next commands."""
    lowest = min(missed, key=lambda defect: defect.score)
    run = shlex.quote(str(options.model))
    print()
    if lowest.affordable:
        value, reject = lowest.catching_threshold, lowest.thresholds.image
        print(
            f"Lower the review threshold ({percent(lowest.cost.expected)} of good parts flagged): "
            f"anomaly calibrate --model {run} --threshold {reject:.5g} "
            f"--review-threshold {value:.5g}"
        )
    if not options.keep:
        images = shlex.join(map(str, options.images))
        print(f"Keep as known defects: anomaly missed {images} --model {run} --keep")
    defects = folder.parent / "golden" / MISSED if options.keep else Path("FOLDER")
    tune = Run(model, folder, training_record(folder), ("--defects", defects)).tune()
    print(
        "Settings chosen by so few images may miss other defects. With six or more known "
        f"defects: {tune}"
    )
