"""Training with progress shown, and what is said of it: for the commands that train."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli.logging_setup import ProgressLine
from anomaly.config.schema import METHODS
from anomaly.errors import first_of, some
from anomaly.scoring.image_statistics import LEAST_IMAGES
from anomaly.training.runs import train_run

if TYPE_CHECKING:
    import torch

    from anomaly.calibration import Thresholds
    from anomaly.config.schema import Config
    from anomaly.datasets import Dataset
    from anomaly.training.fit import SharedFeaturesOf

log = logging.getLogger(__name__)

_NAMED = 3  # images that stand out; train.json has all
_FEW = 16  # images of which turned copies may add something


@dataclass(frozen=True)
class TrainOptions:
    """How a command trains, whatever the config.

    Attributes:
        device: where to compute.
        threads: decoding processes.
        calibrate: whether to find thresholds.
        overwrite: replace an earlier run.
        shared: has other machines compute features and scores; None for this process.
    """

    device: torch.device
    threads: int
    calibrate: bool = True
    overwrite: bool = False
    shared: SharedFeaturesOf | None = None


def train_and_say(
    config: Config, dataset: Dataset, output: Path, how: TrainOptions, product: str = ""
) -> int:
    """Train one model, and print what came of it.

    Args:
        config: all settings.
        dataset: what to learn from.
        output: the run's folder.
        how: to train.
        product: names it, for progress; empty for one that isn't one of several.

    Returns:
        The exit code: 3 where images couldn't be used.
    """
    with ProgressLine() as line:

        def progress(stage: str, done: int, total: int) -> None:
            line(f"{product}, {stage}" if product else stage, done, total)

        training, summary = train_run(
            config,
            dataset,
            output,
            device=how.device,
            workers=how.threads,
            calibrate=how.calibrate,
            overwrite=how.overwrite,
            shared=how.shared,
            progress=progress,
        )
    _say(summary, output, training.detector.thresholds)
    return 3 if training.refused else 0


def _say(summary: dict[str, Any], output: Path, thresholds: Thresholds | None) -> None:
    images, vectors = summary["images"], summary["bank_vectors"]
    learned = f"{images['learned']} images, {summary['patches']:,} patches"
    kept = f", {vectors:,} kept in the memory bank" if vectors else ""
    print(f"trained {summary['name']} ({summary['kind']}) on {learned}{kept}")
    if thresholds is None:
        print("no thresholds, so results will have no verdicts; `anomaly calibrate` finds some")
    else:
        for line in thresholds.lines():
            print(line)
        say_raised(thresholds, output)
    if images["learned"] < LEAST_IMAGES:
        log.info(
            "so few images (%d) don't show what is usual: it takes %d for another product, a lens "
            "cap or a blurred image to be noticed as such",
            images["learned"],
            LEAST_IMAGES,
        )
    if images["learned"] <= _FEW and _could_turn(summary):
        log.info(
            "%d images are few; where the part may lie any way, and a turned one is as good, train "
            "with --set model.turned_copies=quarter_turns, which learns turned copies of them, too",
            images["learned"],
        )
    _say_patch(summary)
    if summary["suspects"]:
        learned = "" if summary["left_out"] else "; a defect among the good ones is learned as good"
        log.info("look at these training images%s:", learned)
        for suspect in summary["suspects"][:3]:
            picture = output / suspect["heatmap"]
            log.info("  %.4g  %s  %s", suspect["score"], suspect["name"], picture)
    if stand_out := summary["stand_out"]:
        _say_stand_out(stand_out, summary["left_out"])
    if odd := summary["odd"]:
        log.info(
            "%d of %d training images would be for review whatever their score, being so unlike "
            "the others: %s",
            len(odd),
            images["learned"],
            some(odd),
        )
    _say_refused(summary["refused"])
    seconds, peak = summary["seconds"]["total"], summary["peak_memory_bytes"] / 1e9
    print(
        f"{seconds:.1f} s, {peak:.2f} GB at most; model {summary['model_id']} in {output / 'model'}"
    )


def _could_turn(summary: dict[str, Any]) -> bool:
    """Whether the model could learn turned copies and doesn't."""
    return summary["turned_copies"] == "none" and not METHODS[summary["kind"]].one_grid


def _say_stand_out(images: dict[str, float], left_out: bool) -> None:
    """Which training images stand out from all others, and what becomes of them."""
    names = some([*images], most=_NAMED)
    names += ", train.json names all" if len(images) > _NAMED else ""
    if left_out:
        log.info(
            "nothing was learned from what stands out from all others: %s; where it is good, "
            "--set model.leave_out_suspects=false learns it",
            names,
        )
    else:
        log.info(
            "standing out from all others: %s; where that isn't good, take it away, or train with "
            "--set model.leave_out_suspects=true, which learns nothing from what stands out",
            names,
        )


def say_raised(thresholds: Thresholds, model: Path) -> None:
    """Which good images put the reject threshold so high, and what to do about it."""
    raised = thresholds.raised_by()
    for i, (name, score, value) in enumerate(raised):
        without = "without it" if i == 0 else f"without it and the {i} before"
        log.info(
            f"{name} scores {score:.5g} and raises the reject threshold: "
            f"{without} that would be {value:.5g} instead of {thresholds.image:.5g}"
        )
    if raised:
        out = [image.name for image in thresholds.good.left_out]  # or they would count again
        names = shlex.join([*out, *(name for name, _, _ in raised)])
        log.info(
            "  look at what raises it; where it isn't good: "
            f"anomaly calibrate --model {shlex.quote(str(model))} --without {names}"
        )


def _say_patch(summary: dict[str, Any]) -> None:
    size = summary["patch_size"]
    (height, width), mm = size["pixels"] or (0.0, 0.0), size["mm"]
    real = f", {mm[0]:.3g} × {mm[1]:.3g} mm" if mm else ""
    log.info(
        f"one patch covers {height:.0f} × {width:.0f} original pixels{real} (height × width): "
        "smaller defects may not be seen"
    )
    log.info(f"  {_remedy(summary)}")


def _remedy(summary: dict[str, Any]) -> str:
    """What makes patches smaller."""
    image = summary["image"]
    if image["resize"] is not None:
        return f"image.resize above {image['resize']} sees smaller ones, and takes longer"
    if image["tile"] is not None:
        return f"image.tile below {image['tile']} sees smaller ones, and takes longer"
    area = f"image.area above {image['area']}"
    if METHODS[summary["kind"]].one_grid:
        return f"{area} sees smaller ones, and takes longer"
    return f"{area} or image.tile, which cuts large images up, sees smaller ones, and takes longer"


def _say_refused(refused: dict[str, str]) -> None:
    for reason in first_of([*refused.values()], "; train.json lists all"):
        log.warning("skipped: %s", reason)
