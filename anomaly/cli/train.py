"""`anomaly train`: good images -> a model folder and train.json."""

from __future__ import annotations

import argparse
import logging
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine
from anomaly.files.own_outputs import TRAIN

if TYPE_CHECKING:
    from anomaly.calibration import Thresholds
    from anomaly.config.schema import Config
    from anomaly.datasets import Sample
    from anomaly.model.training import Training

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_arguments(parser)
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run there")
    parser.add_argument(
        "--no-calibrate", action="store_true", help="find no thresholds; results have no verdicts"
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
    from anomaly.config.files import load_config
    from anomaly.files.output_lock import locked

    config = load_config(options.config, options.overrides)
    output: Path = options.output or Path("runs") / config.name
    with locked(output):
        return _run(options, config, output)


def _run(options: argparse.Namespace, config: Config, output: Path) -> int:
    from anomaly.datasets import open_dataset

    started = time.perf_counter()
    dataset = open_dataset(config.data.format, config.data.root, config.data.category)

    from anomaly.files.writing import as_json, claim, write
    from anomaly.model.training import train

    device, threads = machine.settle(options)
    claim(output, () if options.overwrite else TRAIN, overwrite=False)
    with ProgressLine() as progress:
        training = train(
            config,
            dataset.train,
            device=device,
            scratch=output,
            workers=threads,
            calibrate=not options.no_calibrate,
            progress=progress,
        )
    before = time.perf_counter()
    model_id = training.detector.save(output / "model", overwrite=options.overwrite)
    training.seconds["save"] = time.perf_counter() - before
    summary = _summary(training, output / "model", model_id)
    claim(output, ("suspects",), overwrite=True)
    summary["suspects"] = _draw_suspects(training, dataset.train, output)
    summary["data_folder"] = str(dataset.folder.absolute())
    summary["seconds"] = {
        stage: round(seconds, 3) for stage, seconds in training.seconds.items()
    } | {"total": round(time.perf_counter() - started, 3)}
    write(output / "train.json", as_json(summary))
    _say(summary, output, training.detector.thresholds)
    return 3 if training.refused else 0


def _summary(training: Any, model: Path, model_id: str) -> dict[str, Any]:
    """What train.json says, but for times and places."""
    scorer = {
        name: list(t.shape) if t.ndim else t.item()
        for name, t in training.detector.scorer.tensors().items()
    }
    thresholds = training.detector.thresholds
    image = training.detector.config.image
    return {
        "name": training.detector.config.name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": model_id,
        "kind": training.detector.config.model.kind,
        "device": training.detector.device.type,
        "images": {
            "learned": training.learned,
            "behind_thresholds": 0 if thresholds is None else thresholds.images,
            "refused": len(training.refused),
        },
        "patches": training.patches,
        "patch_size": _patch_size(training),
        "image": {name: getattr(image, name) for name in ("area", "resize", "tile")},
        "bank_vectors": scorer["vectors"][0] if "vectors" in scorer else None,
        "scorer": scorer,
        "thresholds": None if thresholds is None else thresholds.to_json(),
        "raised_by": [
            {"name": name, "score": score, "reject_without": value}
            for name, score, value in (thresholds.raised_by() if thresholds else ())
        ],
        "odd": list(training.odd),
        "refused": training.refused,
        "model_bytes": sum(f.stat().st_size for f in model.iterdir()),
        "peak_memory_bytes": machine.peak_memory(),
    }


def _draw_suspects(
    training: Training, samples: Sequence[Sample], output: Path
) -> list[dict[str, Any]]:
    """Heatmaps of the training images that look least like the others; what train.json says."""
    from anomaly.files.writing import short_name, write
    from anomaly.imaging.decoder_pool import Decoders
    from anomaly.imaging.decoder_worker import Task
    from anomaly.imaging.preprocessing import Loaded
    from anomaly.maps.anomaly_map import SourceMap
    from anomaly.maps.heatmap import encode_png, heatmap

    detector = training.detector
    thresholds = detector.thresholds
    listed = []
    wanted = [(s.image, samples[s.image].path) for s in training.suspects]
    with Decoders(1, Task(detector.loading, whole=True)) as decoders:
        for rank, loaded in enumerate(decoders.load_all(wanted), 1):
            if not isinstance(loaded, Loaded):  # it has changed since it was learned from
                continue
            suspect, sample = training.suspects[rank - 1], samples[loaded.index]
            seen = SourceMap(
                suspect.patch_scores, loaded.view, detector.config.model.smoothing, detector.region
            )
            limit = suspect.score if thresholds is None else thresholds.pixel
            review = None if thresholds is None else thresholds.review_pixel
            picture = f"suspects/{rank}_{short_name(sample.path.stem)}.png"
            write(output / picture, encode_png(heatmap(loaded.decoded, seen, limit, review)))
            listed.append({"name": sample.name, "score": suspect.score, "heatmap": picture})
    return listed


def _patch_size(training: Training) -> dict[str, list[float] | None]:
    mm = training.detector.config.image.mm_per_pixel
    height, width = training.patch_pixels
    return {
        "pixels": [round(height, 2), round(width, 2)],
        "mm": None if mm is None else [round(height * mm, 4), round(width * mm, 4)],
    }


def _say(summary: dict[str, Any], output: Path, thresholds: Thresholds | None) -> None:
    from anomaly.model.appearance import LEAST_IMAGES

    images, vectors = summary["images"], summary["bank_vectors"]
    learned = f"{images['learned']} images, {summary['patches']:,} patches"
    kept = f", {vectors:,} kept in the memory bank" if vectors else ""
    print(f"trained {summary['name']} ({summary['kind']}) on {learned}{kept}")
    if thresholds is None:
        print("no thresholds, so results will have no verdicts; `anomaly calibrate` finds some")
    else:
        for line in thresholds.lines():
            print(line)
        _say_raised(summary["raised_by"], thresholds.image, output)
    if images["learned"] < LEAST_IMAGES:
        print(
            f"{images['learned']} images don't show what is usual: it takes {LEAST_IMAGES} for "
            "another product, a lens cap or a blurred image to be noticed as such"
        )
    _say_patch(summary)
    if summary["suspects"]:
        print("look at these training images; a defect among the good ones is learned as good:")
        for suspect in summary["suspects"][:3]:
            print(f"  {suspect['score']:.4g}  {suspect['name']}  {output / suspect['heatmap']}")
    if odd := summary["odd"]:
        print(
            f"{len(odd)} of {images['learned']} training images would be for review whatever their "
            f"score, being so unlike the others: {_some(odd)}"
        )
    _say_refused(summary["refused"])
    seconds, peak = summary["seconds"]["total"], summary["peak_memory_bytes"] / 1e9
    print(
        f"{seconds:.1f} s, {peak:.2f} GB at most; model {summary['model_id']} in {output / 'model'}"
    )


def _say_raised(raised: Sequence[dict[str, Any]], reject: float, output: Path) -> None:
    """Which good images put the reject threshold so high, and what to do about it."""
    for i, image in enumerate(raised):
        without = "without it" if i == 0 else f"without it and the {i} before"
        print(
            f"{image['name']} scores {image['score']:.5g} and raises the reject threshold: "
            f"{without} that would be {image['reject_without']:.5g} instead of {reject:.5g}"
        )
    if raised:
        names = " ".join(shlex.quote(image["name"]) for image in raised)
        print(
            "  look at what raises it; where it isn't good: "
            f"anomaly calibrate --model {shlex.quote(str(output))} --without {names}"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _say_patch(summary: dict[str, Any]) -> None:
    size = summary["patch_size"]
    (height, width), mm = size["pixels"] or (0.0, 0.0), size["mm"]
    real = f", {mm[0]:.3g} × {mm[1]:.3g} mm" if mm else ""
    print(
        f"one patch covers {height:.0f} × {width:.0f} original pixels{real} (height × width): "
        "smaller defects may not be seen"
    )
    print(f"  {_remedy(summary)}")


def _remedy(summary: dict[str, Any]) -> str:
    """What makes patches smaller."""
    from anomaly.config.methods import METHODS

    image = summary["image"]
    if image["resize"] is not None:
        return f"image.resize above {image['resize']} sees smaller ones, and takes longer"
    if image["tile"] is not None:
        return f"image.tile below {image['tile']} sees smaller ones, and takes longer"
    area = f"image.area above {image['area']}"
    if METHODS[summary["kind"]].one_grid:
        return f"{area} sees smaller ones, and takes longer"
    return f"{area} or image.tile, which cuts large images up, sees smaller ones, and takes longer"


def _say_refused(refused: dict[str, str], shown: int = 5) -> None:
    reasons: Sequence[str] = list(refused.values())
    for reason in reasons[:shown]:
        log.warning("skipped: %s", reason)
    if len(reasons) > shown:
        log.warning("skipped %d more images; train.json lists all", len(reasons) - shown)
