"""Weaknesses of a model, the most important first, and flagged images against the promised rate.

Each comes with the command that helps.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from anomaly.calibration.rates import Rate, binomial, images_needed, percent, supported_rate
from anomaly.calibration.thresholds import thresholds_from
from anomaly.errors import counted, some
from anomaly.files.tables import text_table
from anomaly.scoring.image_statistics import LEAST_IMAGES

if TYPE_CHECKING:
    from anomaly.config.schema import Config
    from anomaly.evaluation.evaluate import Evaluation
    from anomaly.scoring.model import Model, Scored

_PRINTED = 3  # weaknesses
_RATES = (0.02, 0.05, 0.1, 0.2)  # review rates to compare
_LEAST_ALIKE = 3  # images that stand out: fewer may do so by chance
_FAR = 1.1  # times the reject threshold, above which an image is far from all others
_FINER_BY = 1.2  # times the pixels a side; less gains little
LEAST_DEFECTS = 6  # parts with a defect; with fewer `tune` finds no difference beyond chance
LEAST_PARTS = 20  # with fewer the flagged share isn't compared with the promise
DEFECT_SHARE = 0.01  # share of defects on a line that keeps its promise
# Chance that a comparison finds a difference where there is none. Repeated with each of 2,000
# parts, it warns on some 3 % of lines: the promise's bounds are seldom that far off.
_CHANCE = 0.01
_MANY = 2000  # images; beyond it a bound replaces the sum of the binomial tail

Comparison = Literal["as promised", "more", "fewer"]


@dataclass(frozen=True)
class Weakness:
    """Something that lets defects pass or flags good parts.

    Attributes:
        finding: the weakness, with the number of images concerned.
        remedy: the advice against it.
        command: the command line to run; empty where none helps.
    """

    finding: str
    remedy: str
    command: str = ""


@dataclass(frozen=True, eq=False)
class Run:
    """A model and the folders that commands about it have to name.

    Attributes:
        model: the trained model.
        folder: the run, or the model folder, as the user named it.
        record: the contents of train.json; empty where there is none.
        tested: options that name the test images; empty for those of its data set.
    """

    model: Model
    folder: Path
    record: Mapping[str, Any]
    tested: Sequence[object] = ()

    def train(self, *settings: str) -> str:
        """The command that trains a further model, with other settings (KEY=VALUE)."""
        overrides = [part for setting in settings for part in ("--set", setting)]
        return command("train", *self.config, *overrides, "--output", f"{self.place}_new")

    @property
    def place(self) -> Path:
        """The run's folder."""
        return self.folder.parent if self.folder.name == "model" else self.folder

    @property
    def config(self) -> list[object]:
        """Options that name the settings and the data set that the model was trained with."""
        root = f"data.root={self.record.get('data_folder', 'FOLDER')}"
        # The recorded folder is that of the category already.
        whole = ["--set", "data.category=null"] if self.model.config.data.category else []
        folder = self.model.folder or self.place / "model"
        return ["--config", folder / "config.yaml", "--set", root, *whole]


def command(*arguments: object) -> str:
    """A command of this program as a line for the shell."""
    return shlex.join(["anomaly", *map(str, arguments)])


def weakness_lines(weaknesses: Sequence[Weakness], name: str = "") -> list[str]:
    """The three most important weaknesses at most, a line each, for people.

    Args:
        weaknesses: the most important first.
        name: the model's name, where several models are listed.
    """
    prefix = f"{name}: " if name else ""
    return [
        f"{prefix}{weakness.finding} {weakness.remedy} {weakness.command}".strip()
        for weakness in weaknesses[:_PRINTED]
    ]


def training_weaknesses(run: Run) -> tuple[Weakness, ...]:
    """The weaknesses that training alone shows: images that may be defects, or too few images."""
    return (*_suspects(run), *_few(run))


def evaluation_weaknesses(run: Run, evaluation: Evaluation) -> tuple[Weakness, ...]:
    """The weaknesses that verdicts on test images show; none without thresholds."""
    counts, limits = evaluation.verdicts, evaluation.thresholds
    if counts is None:
        return ()
    missed = [
        image
        for image in evaluation.scored
        if image.sample.is_defect and image.verdict(limits) == "good"
    ]
    return (
        *_missed(run, missed, counts.defective.total),
        *_too_coarse(run, missed),
        *(_few(run) if missed else ()),
        *_flagged(run, counts.good.review + counts.good.reject, counts.good.total),
    )


def review_rates(run: Run, evaluation: Evaluation) -> tuple[str, ...]:
    """A table of defects caught and good images flagged at other review rates, and a command.

    Thresholds come from the model's own good images; the test images only measure them.

    Returns:
        Lines for people; none where no rate would catch more, or without calibrated limits.
    """
    limits = evaluation.thresholds
    if limits is None or limits.label != "calibrated":
        return ()
    now, reject = run.model.rates()
    counts = {}
    for rate in sorted({*_RATES, now}):
        others = limits if rate == now else thresholds_from(limits.good, rate, min(rate, reject))
        if verdicts := replace(evaluation, thresholds=others).verdicts:
            counts[rate] = verdicts
    if max(count.caught for count in counts.values()) == counts[now].caught:
        return ()
    rows = [
        (
            f"{percent(rate)} (now)" if rate == now else percent(rate),
            f"{count.caught} of {count.defective.total}",
            f"{count.good.review + count.good.reject} of {count.good.total}",
        )
        for rate, count in counts.items()
    ]
    table = text_table([("review rate", "defects caught", "good flagged"), *rows])
    calibrate = command("calibrate", "--model", run.folder, "--review-rate", "RATE")
    return (*table, f"another review rate: {calibrate}")


def _missed(run: Run, missed: Sequence[Scored], defects: int) -> Iterator[Weakness]:
    """Defects that pass: `tune` first, and where it can't help, the explanation of one.

    Of all scored images `defects` show a defect, and those in `missed` were called good.
    """
    if not missed:
        return
    share = percent(len(missed) / defects)
    finding = f"{len(missed)} of {counted(defects, 'defect')} pass as good ({share})."
    config = run.model.config
    if defects >= LEAST_DEFECTS and not config.chosen_by:  # tune hasn't been run yet
        remedy = "Try other settings on the known defects (10 minutes at most):"
        output = f"{config.name}_tuned.yaml"
        tune = command("tune", *run.config, *run.tested, "--output", output)
        yield Weakness(finding, remedy, tune)
        return
    reason = "The settings are those that tune chose."
    if defects < LEAST_DEFECTS:
        reason = f"With {LEAST_DEFECTS} known defects or more, tune can choose settings."
    remedy = f"{reason} See why {'the first' if len(missed) > 1 else 'it'} passes:"
    explain = command("explain", missed[0].sample.path, "--model", run.folder)
    yield Weakness(finding, remedy, explain)


def _too_coarse(run: Run, missed: Sequence[Scored]) -> Iterator[Weakness]:
    """Defects that pass and are narrower than a patch, where the images have more pixels."""
    size = run.record.get("patch_size", {}).get("pixels")
    if not size:
        return
    patch = max(size)
    scale = patch / min(run.model.extractor.strides)  # image pixels to one of the network
    widths = [image.width for image in missed if image.width is not None and image.width < patch]
    factor = min(scale, patch / median(widths)) if widths else 1.0
    if factor < _FINER_BY:
        return
    finding = (
        f"{len(widths)} of {counted(len(missed), 'missed defect')} are narrower than a patch: "
        f"{median(widths):.2g} of its {patch:.2g} pixels (median)."
    )
    remedy = f"Show the network more pixels (about {factor**2:.2g} times the time):"
    yield Weakness(finding, remedy, run.train(_finer(run.model.config, factor)))


def _finer(config: Config, factor: float) -> str:
    """The setting (KEY=VALUE) that makes patches smaller by a factor, about."""
    image = config.image
    if image.tile is not None:
        return f"image.tile={max(64, round(image.tile / factor))}"
    name, side = ("area", image.area) if image.resize is None else ("resize", image.resize)
    return f"image.{name}={round(side * factor / 32) * 32}"


def _few(run: Run) -> Iterator[Weakness]:
    """Too few good images for a review zone: both thresholds lie above the highest score."""
    thresholds = run.model.thresholds
    if thresholds is None or thresholds.label != "calibrated":
        return
    reject = thresholds.to_reject
    if reject.supported or reject.target is None or thresholds.review < thresholds.image:
        return
    finding = (
        f"{counted(thresholds.images, 'good image')} can't guarantee a false-reject rate below "
        f"{percent(supported_rate(thresholds.images))}, so there is no review zone."
    )
    remedy = f"Use {images_needed(reject.target)} images for {percent(reject.target)}; "
    remedy += "a review zone needs 39."  # at the default review rate
    if thresholds.images < LEAST_IMAGES:
        remedy += f" With fewer than {LEAST_IMAGES} another product or a lens cap isn't recognised."
    yield Weakness(finding, remedy)


def _suspects(run: Run) -> Iterator[Weakness]:
    """Training images that may be defects.

    These are odd ones, those that raise a threshold or score far above it, and all that stand out
    if they are three or more; one or two are only in train.json.
    """
    thresholds = run.model.thresholds
    if thresholds is None or run.record["left_out"]:
        return
    raised = thresholds.raised_by()
    apart = run.record["stand_out"]  # scores by name
    every = raised or len(apart) >= _LEAST_ALIKE
    far = [name for name, score in apart.items() if every or score > _FAR * thresholds.image]
    names = [*dict.fromkeys([*far, *(name for name, _, _ in raised), *run.record["odd"]])]
    if not names:
        return
    look = "looks" if len(names) == 1 else "look"
    finding = f"{counted(len(names), 'training image')} {look} unlike all others: {some(names)}."
    if raised:
        finding += (
            f" Without {some([name for name, _, _ in raised])} the reject threshold would be "
            f"{raised[-1][2]:.5g} instead of {thresholds.image:.5g}."
        )
    remedy = (
        f"Look at them (heatmaps of the most unusual: {run.folder / 'suspects'}). Remove images "
        "that aren't good and train again:"
    )
    yield Weakness(finding, remedy, run.train())


def _flagged(run: Run, flagged: int, images: int) -> Iterator[Weakness]:
    """More flagged good images than the thresholds promise.

    Of all scored good test images `flagged` are rejected or for review.
    """
    assert run.model.thresholds is not None  # else nothing is flagged
    promised = run.model.thresholds.to_review.false_rejects
    if compare_flagged(flagged, images, promised) == "more":
        finding = (
            f"{flagged} of {counted(images, 'good image')} are flagged "
            f"({percent(flagged / images)}); at most {percent(promised.at_most)} expected for good "
            "parts like the training images."
        )
        remedy = "Let the model learn other good images like these:"
        learned = ["--good", "FOLDER", "--output", f"{run.place}_updated"]
        yield Weakness(finding, remedy, command("update", "--model", run.folder, *learned))


def compare_flagged(flagged: int, images: int, promised: Rate) -> Comparison:
    """Compare the flagged share with the promise: `more`, `fewer` or `as promised`.

    A binomial test against the bounds of the promise, which may be repeated as images come. Fewer
    than `LEAST_PARTS` images count as promised.

    Args:
        flagged: number of images above a threshold.
        images: number of images without a reason for review.
        promised: the threshold's false-reject rate.
    """
    if images < LEAST_PARTS:
        return "as promised"
    most = promised.at_most + DEFECT_SHARE * (1 - promised.at_most)
    if _chance(flagged, images, most) < _CHANCE:
        return "more"
    if _chance(images - flagged, images, 1 - promised.low) < _CHANCE:
        return "fewer"
    return "as promised"


def _chance(count: int, images: int, rate: float) -> float:
    """Chance that `count` or more images are flagged at this rate; for many images a bound."""
    share = count / images
    if share <= rate:  # or the rate is 1
        return 1.0
    if images <= _MANY:
        return float(binomial(images, rate)[count:].sum())
    # Kullback–Leibler divergence of two coins with these rates; its second term vanishes at 1.
    divergence = share * math.log(share / rate)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - rate))
    return math.exp(-images * divergence)  # Chernoff's bound


def flagged_line(flagged: int, images: int, promised: Rate, run: object = "RUN") -> str:
    """A warning if more or fewer images are flagged than promised; empty otherwise.

    Args:
        flagged: number of images above the review threshold.
        images: number of images without a reason for review.
        promised: false-reject rate of the review threshold.
        run: the model's folder, for the command.
    """
    comparison = compare_flagged(flagged, images, promised)
    if comparison == "as promised":
        return ""
    line = f"{flagged} of {images} images flagged ({percent(flagged / images)}); "
    line += f"{percent(promised.expected)} expected, at "
    if comparison == "fewer":
        line += f"least {percent(promised.low)}. These thresholds let defects pass"
    else:
        line += f"most {percent(promised.at_most)} of good parts. Look at them first: if most are "
        line += "defects, change nothing. If most are good, these images differ from the training "
        line += "images"
    calibrate = command("calibrate", "--model", run, "--production", "FOLDER")
    return f"{line}: find thresholds for images like these with {calibrate}"
