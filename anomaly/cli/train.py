"""`anomaly train`: good images -> a model folder and train.json."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine

log = logging.getLogger(__name__)

CONFIG_FOLDERS = (Path("configs"), Path(__file__).parents[2] / "configs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_arguments(parser)
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run there")
    parser.add_argument(
        "--no-calibrate", action="store_true", help="find no threshold; results have no verdicts"
    )
    machine.add_arguments(parser)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a config and change its values."""
    parser.add_argument(
        "--config", required=True, help="a YAML file, or a bare name looked up in configs/"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, e.g. --set model.kind=padim; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Train one model."""
    from anomaly.config import load_config
    from anomaly.datasets import open_dataset

    started = time.perf_counter()
    config = load_config(options.config, options.overrides, CONFIG_FOLDERS)
    dataset = open_dataset(config.data.format, config.data.root, config.data.category)
    output: Path = options.output or Path("runs") / config.name

    import torch

    from anomaly.checkpoint import save
    from anomaly.files import claim, write
    from anomaly.training import fit

    device, threads = machine.settle(options)
    assert isinstance(device, torch.device)
    is_new = not output.exists()
    claim(output, () if options.overwrite else ("model", "train.json"), overwrite=False)
    try:
        with ProgressLine() as progress:
            training = fit(
                config,
                dataset.train,
                device=device,
                scratch=output,
                workers=threads,
                calibrate=not options.no_calibrate,
                progress=progress,
            )
        before = time.perf_counter()
        model_id = save(training, output / "model", overwrite=options.overwrite)
        training.seconds["save"] = time.perf_counter() - before
    finally:
        if is_new:
            with suppress(OSError):  # holds something: keep it
                output.rmdir()
    summary = _summary(training, output / "model", model_id)
    summary["data_folder"] = str(dataset.folder.absolute())
    summary["seconds"] = {
        stage: round(seconds, 3) for stage, seconds in training.seconds.items()
    } | {"total": round(time.perf_counter() - started, 3)}
    write(output / "train.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    _say(summary, output)
    return 3 if training.refused else 0


def _summary(training: Any, model: Path, model_id: str) -> dict[str, Any]:
    """What train.json says, but for times and places."""
    from dataclasses import asdict

    scorer = {name: list(t.shape) for name, t in training.detector.scorer.tensors().items()}
    thresholds = training.detector.thresholds
    return {
        "name": training.detector.config.name,
        "model_id": model_id,
        "kind": training.detector.config.model.kind,
        "device": training.detector.device.type,
        "images": {
            "learned": len(training.hashes),
            "held_out_for_threshold": len(training.held_out),
            "refused": len(training.refused),
        },
        "patches": training.patches,
        "bank_vectors": scorer["vectors"][0] if "vectors" in scorer else None,
        "scorer": scorer,
        "thresholds": None if thresholds is None else asdict(thresholds),
        "refused": training.refused,
        "model_bytes": sum(f.stat().st_size for f in model.iterdir()),
        "peak_memory_bytes": machine.peak_memory(),
    }


def _say(summary: dict[str, Any], output: Path) -> None:
    images, thresholds = summary["images"], summary["thresholds"]
    vectors = summary["bank_vectors"]
    learned = f"{images['learned']} images, {summary['patches']:,} patches"
    kept = f", {vectors:,} kept in the memory bank" if vectors else ""
    print(f"trained {summary['name']} ({summary['kind']}) on {learned}{kept}")
    if thresholds is None:
        print("no threshold, so results will have no verdicts")
    else:
        print(
            f"threshold {thresholds['image']:.4g}, {thresholds['label']}: the highest score of "
            f"{thresholds['images']} good images, scored by a model trained without them"
        )
    _say_refused(summary["refused"])
    seconds, peak = summary["seconds"]["total"], summary["peak_memory_bytes"] / 1e9
    print(
        f"{seconds:.1f} s, {peak:.2f} GB at most; model {summary['model_id']} in {output / 'model'}"
    )


def _say_refused(refused: dict[str, str], shown: int = 5) -> None:
    reasons: Sequence[str] = list(refused.values())
    for reason in reasons[:shown]:
        log.warning("skipped: %s", reason)
    if len(reasons) > shown:
        log.warning("skipped %d more images; train.json lists all", len(reasons) - shown)
