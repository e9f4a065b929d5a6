"""`anomaly calibrate`: other thresholds for a trained model, each change on record."""

from __future__ import annotations

import argparse
import logging
import shlex
from dataclasses import fields

from anomaly.cli.commands import share_of
from anomaly.cli.common import agreed, ask, chosen_device, images_given
from anomaly.cli.terminal import ProgressLine
from anomaly.datasets import Sample
from anomaly.desk.calibrate import Asked, Recalibration, recalibrate
from anomaly.errors import AnomalyError
from anomaly.files.writing import locked
from anomaly.storage.folder import HISTORY, find_model
from anomaly.storage.load import load_model
from anomaly.storage.thresholds import replace_thresholds

log = logging.getLogger(__name__)

_SHARE = (
    "Look at the images first, those that are flagged now above all. What share of them may be "
    "defective, at most (5% say, 0% if all are good)?"
)


def run(options: argparse.Namespace) -> int:
    """Choose thresholds and write them into the model folder.

    Returns:
        0 done, 3 done without some images that can't be used, 1 refused, because known defects that
        are caught now would pass or the reject threshold would rise by more than chance explains;
        nothing was written.
    """
    if options.production and options.at_most_defective is None and (answer := ask(_SHARE)):
        try:
            options.at_most_defective = share_of(answer)
        except argparse.ArgumentTypeError as error:
            raise AnomalyError(str(error)) from None
    asked = Asked(**{field.name: getattr(options, field.name) for field in fields(Asked)})
    asked.check(good=bool(options.good), production=bool(options.production))
    images = {name: images_given(options, name) for name in ("good", "defects")}
    unsorted = bool(asked.at_most_defective)
    images["production"] = images_given(options, "production", unsorted=unsorted)
    model = find_model(options.model, exported=False).resolve()
    with locked(model.parent if model.name == "model" else model):  # a run's lock is its model's
        return _run(options, asked, images)


def _run(options: argparse.Namespace, asked: Asked, images: dict[str, list[Sample]]) -> int:
    device = chosen_device(options)
    model = load_model(options.model, device)
    with ProgressLine() as progress:
        made = recalibrate(model, asked, **images, progress=progress)
    print("\n".join(made.lines()))
    if made.thresholds == model.thresholds:
        print("the model already has these thresholds; nothing was changed")
    elif agreed(made.doubts, options):
        _save(options, made)
    else:
        return 1
    return 3 if made.refused else 0


def _save(options: argparse.Namespace, made: Recalibration) -> None:
    """Write the thresholds into the model folder, and say how to undo that."""
    new, before = made.thresholds, made.before
    model_id = replace_thresholds(options.model, new, dict(made.record))
    print(
        f"new thresholds saved: model {before.model_id} is now {model_id}; all changes are listed "
        f"in {find_model(options.model) / HISTORY}"
    )
    command = f"anomaly calibrate --model {shlex.quote(str(options.model))}"
    if raised := [name for name, _, _ in new.raised_by()]:
        log.info("look at the images that raise it; if they aren't good:")
        log.info("  %s --without %s", command, shlex.join(raised))
    if before.thresholds is not None:
        log.info("To undo: %s --undo", command)
