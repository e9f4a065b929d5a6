"""`anomaly train`: good images -> a model folder and train.json."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Container
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.backbones.weights import weights_file
from anomaly.cli import annex
from anomaly.cli.terminal import ProgressLine
from anomaly.config.load import load_config
from anomaly.datasets.layouts import open_dataset
from anomaly.desk.advice import Run, training_weaknesses, weakness_lines
from anomaly.errors import first_of, some
from anomaly.files.writing import locked
from anomaly.imaging.pool import warm_up
from anomaly.runtime import device_of
from anomaly.training.runs import train_run

if TYPE_CHECKING:
    from anomaly.scoring.model import Model

log = logging.getLogger(__name__)


def run_train(options: argparse.Namespace) -> int:
    """Train a model and write the run.

    Returns:
        0 done, 3 done without some unusable images.
    """
    config = load_config(options.config, options.overrides)
    output: Path = options.output or Path("runs") / config.name
    data = config.data
    with locked(output):
        # Refusals come before torch is imported, which takes seconds.
        dataset = open_dataset(data.format, data.root, data.category)
        weights_file(config.backbone.weights)  # refuses a wrong path
        warm_up(len(dataset.train))  # decoding processes start while torch is imported
        device = device_of(options.device)
        with ExitStack() as opened:
            features_of = None
            if options.ray is not None:
                workers = annex("cluster.workers")
                cluster = opened.enter_context(workers.joined(options.ray, device.type))
                features_of = partial(workers.cluster_features, cluster)
            training, summary = train_run(
                config,
                dataset,
                output,
                device=device,
                calibrate=not options.no_calibrate,
                overwrite=options.overwrite,
                features_of=features_of,
                progress=opened.enter_context(ProgressLine()),
            )
        _report(summary, output, training.model, getattr(options, "reported", ()))
        return 3 if training.refused else 0


def _report(summary: dict[str, Any], output: Path, model: Model, reported: Container[str]) -> None:
    """Print the facts of a training: counts, thresholds, images left out, advice, time.

    Args:
        summary: the content of train.json.
        output: the run's folder.
        model: the trained model.
        reported: reasons for unusable images that `start` has printed already.
    """
    thresholds = model.thresholds
    images, vectors = summary["images"]["learned"], summary["bank_vectors"]
    kept = f", {vectors:,} kept in the memory bank" if vectors else ""
    print(
        f"trained {summary['name']} ({summary['kind']}) on {images} images, "
        f"{summary['patches']:,} patches{kept}"
    )
    if thresholds is None:
        print(
            "no thresholds, so results will have no verdicts; find thresholds with `anomaly "
            "calibrate`"
        )
    else:
        print("\n".join(thresholds.lines()))
    _report_patch_size(summary)
    if summary["left_out"]:
        log.info(
            "left out of training, because they look unlike all other images: %s (see train.json). "
            "If they are good, train with --set model.leave_out_suspects=false",
            some([*summary["stand_out"]]),
        )
    for line in weakness_lines(training_weaknesses(Run(model, output, summary))):
        log.info(line)
    refused = [reason for reason in summary["refused"].values() if reason not in reported]
    for reason in first_of(refused, "; train.json lists all"):
        log.warning("skipped: %s", reason)
    seconds, peak = summary["seconds"]["total"], summary["peak_memory_bytes"] / 1e9
    print(
        f"took {seconds:.1f} s, peak memory {peak:.2f} GB; "
        f"model {summary['model_id']} in {output / 'model'}"
    )


def _report_patch_size(summary: dict[str, Any]) -> None:
    """Print the size of one patch in original pixels, and in mm where the scale is known."""
    height, width = summary["patch_size"]["pixels"] or (0.0, 0.0)
    mm = summary["patch_size"]["mm"]
    real = f", {mm[0]:.3g} × {mm[1]:.3g} mm" if mm else ""
    log.info(
        f"one patch covers {height:.0f} × {width:.0f} original pixels{real} (height × width): "
        "smaller defects may not be seen"
    )
