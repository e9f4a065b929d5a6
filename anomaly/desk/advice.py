"""The weaknesses of a model, the most important first, each with a command against it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    from anomaly.scoring.model import Model, Scored

_PRINTED = 3
_RATES = (0.02, 0.05, 0.1, 0.2)  # of good parts for review
_LEAST_ALIKE = 3  # images that stand out: fewer may do so by chance
_FAR = 1.1  # times the reject threshold, above which an image is far from all others
_FINER_BY = 1.2  # times the pixels a side, below which little is gained
LEAST_DEFECTS = 6  # parts with a defect; with fewer `tune` finds no difference beyond chance
LEAST_PARTS = 20  # fewer say nothing of a rate
DEFECT_SHARE = 0.01  # of the parts on a line, where nobody says otherwise
# Chance that a comparison finds a difference where there is none. Repeated with each of 2,000
# parts, it warns some 3 % of lines: bounds of the promise are seldom so far off.
_CHANCE = 0.01
_MANY = 2000  # images, from which on a bound replaces the sum of the binomial tail

Comparison = Literal["as promised", "more", "fewer"]


@dataclass(frozen=True)
class Weakness:
    """Something that lets defects pass or flags good parts.

    Attributes:
        what: the weakness, with the number of images concerned.
        remedy: the advice against it.
        command: the command line to run; empty where none helps.
    """

    what: str
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
        """The command that trains a further model, with other settings."""
        overrides = [part for setting in settings for part in ("--set", setting)]
        return _command("train", *self._config(), *overrides, "--output", f"{self._run}_new")

    def tune(self) -> str:
        """The command that tries settings on the known defects."""
        output = f"{self.model.config.name}_tuned.yaml"
        return _command("tune", *self._config(), *self.tested, "--output", output)

    def explain(self, image: Path) -> str:
        """The command that says what would have caught a defect."""
        return _command("explain", image, "--model", self.folder)

    def update(self) -> str:
        """The command that lets the model learn more good images."""
        output = f"{self._run}_updated"
        return _command("update", "--model", self.folder, "--good", "FOLDER", "--output", output)

    @property
    def _run(self) -> Path:
        return self.folder.parent if self.folder.name == "model" else self.folder

    def _config(self) -> list[object]:
        """Options that name the settings and the data set that the model was trained with."""
        root = f"data.root={self.record.get('data_folder', 'FOLDER')}"
        whole = ["--set", "data.category=null"] if self.model.config.data.category else []
        folder = self.model.folder or self._run / "model"
        return ["--config", folder / "config.yaml", "--set", root, *whole]


def lines(weaknesses: Sequence[Weakness], name: str = "") -> list[str]:
    """The most important weaknesses, a line each, for people; none where nothing is weak."""
    return [
        f"{name}{': ' if name else ''}{weakness.what} {weakness.remedy} {weakness.command}".strip()
        for weakness in weaknesses[:_PRINTED]
    ]


def of_training(run: Run) -> tuple[Weakness, ...]:
    """The weaknesses that training alone shows: images that may be defects, or too few images."""
    return (*_suspects(run), *_few(run))


def of_images(run: Run, images: Sequence[Scored]) -> tuple[Weakness, ...]:
    """The weaknesses that the verdicts of a test split show.

    Args:
        run: the model that has scored the images, and its folders.
        images: scored test images, none that the model has learned from.
    """
    limits = run.model.thresholds
    if limits is None:
        return ()
    scored = [(image, image.verdict(limits) == "good") for image in images if image.verdict(limits)]
    defects = [passes for image, passes in scored if image.sample.is_defect]
    missed = [image for image, passes in scored if passes and image.sample.is_defect]
    flagged = [not passes for image, passes in scored if not image.sample.is_defect]
    few = _few(run) if missed else ()
    return (
        *_missed(run, missed, len(defects)),
        *_too_coarse(run, missed),
        *few,
        *_flagged(run, sum(flagged), len(flagged)),
    )


def review_rates(run: Run, images: Sequence[Scored]) -> tuple[str, ...]:
    """A table of defects caught and good images flagged at other review rates, and a command.

    Thresholds come from the model's own good images; the test images only measure them.

    Args:
        run: the model that has scored the images, and its folders.
        images: scored test images, none that the model has learned from.

    Returns:
        Lines for people; none where no defect passes, or no rate would catch more.
    """
    limits = run.model.thresholds
    if limits is None or limits.label != "calibrated":
        return ()
    present, reject = run.model.rates()
    rates = sorted({*_RATES, present})
    counts = {}
    for rate in rates:
        new = limits if rate == present else thresholds_from(limits.good, rate, min(rate, reject))
        flagged = [image for image in images if image.verdict(new) in ("review", "reject")]
        caught = sum(image.sample.is_defect for image in flagged)
        counts[rate] = caught, len(flagged) - caught
    usable = [image for image in images if image.score is not None]
    defects = sum(image.sample.is_defect for image in usable)
    good = len(usable) - defects
    if max(caught for caught, _ in counts.values()) == counts[present][0]:
        return ()
    rows = []
    for rate, (caught, flags) in counts.items():
        name = f"{percent(rate)} (now)" if rate == present else percent(rate)
        rows.append((name, f"{caught} of {defects}", f"{flags} of {good}"))
    command = _command("calibrate", "--model", run.folder, "--review-rate", "RATE")
    table = text_table([("review rate", "defects caught", "good flagged"), *rows])
    return (*table, f"another review rate: {command}")


def _missed(run: Run, missed: Sequence[Scored], defects: int) -> Iterator[Weakness]:
    if not missed:
        return
    what = f"{len(missed)} of {counted(defects, 'defect')} pass as good "
    what += f"({percent(len(missed) / defects)})."
    if defects >= LEAST_DEFECTS and not run.model.config.chosen_by:  # tune hasn't been run yet
        remedy = "Try other settings on the known defects (10 minutes at most):"
        yield Weakness(what, remedy, run.tune())
        return
    why = "The settings are those that tune chose."
    if defects < LEAST_DEFECTS:
        why = f"With {LEAST_DEFECTS} known defects or more, tune can choose settings."
    remedy = f"{why} See why {'the first' if len(missed) > 1 else 'it'} passes:"
    yield Weakness(what, remedy, run.explain(missed[0].sample.path))


def _too_coarse(run: Run, missed: Sequence[Scored]) -> Iterator[Weakness]:
    """Defects that pass and are narrower than a patch, where the images have more pixels."""
    size = run.record.get("patch_size", {}).get("pixels")
    if not size:
        return
    patch, scale = max(size), max(size) / min(run.model.extractor.strides)
    widths = [image.width for image in missed if image.width is not None and image.width < patch]
    factor = min(scale, patch / median(widths)) if widths else 1.0
    if factor < _FINER_BY:
        return
    what = (
        f"{len(widths)} of {counted(len(missed), 'missed defect')} are narrower than a patch: "
        f"{median(widths):.2g} of its {patch:.2g} pixels (median)."
    )
    remedy = f"Show the network more pixels (about {factor**2:.2g} times the time):"
    yield Weakness(what, remedy, run.train(_finer(run.model.config, factor)))


def _finer(config: Config, factor: float) -> str:
    """The setting that makes patches smaller by a factor."""
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
    reject, count = thresholds.to_reject, thresholds.images
    if reject.supported or reject.target is None or thresholds.review < thresholds.image:
        return
    what = (
        f"{counted(count, 'good image')} can't guarantee a false-reject rate below "
        f"{percent(supported_rate(count))}, so there is no review zone."
    )
    needed, target = images_needed(reject.target), percent(reject.target)
    remedy = f"Use {needed} images for {target}; a review zone needs 39."
    if count < LEAST_IMAGES:
        remedy += f" With fewer than {LEAST_IMAGES} another product or a lens cap isn't recognised."
    yield Weakness(what, remedy)


def _suspects(run: Run) -> Iterator[Weakness]:
    """Training images that may be no good ones: several, far ones, or what raises a threshold.

    One or two that merely stand out are in train.json.
    """
    record, thresholds = run.record, run.model.thresholds
    if thresholds is None or record["left_out"]:
        return
    raised, apart = thresholds.raised_by(), record["stand_out"]
    every = raised or len(apart) >= _LEAST_ALIKE
    far = [name for name, score in apart.items() if every or score > _FAR * thresholds.image]
    names = [*dict.fromkeys([*far, *(name for name, _, _ in raised), *record["odd"]])]
    if not names:
        return
    look = "looks" if len(names) == 1 else "look"
    what = f"{counted(len(names), 'training image')} {look} unlike all others: {some(names)}."
    if raised:
        what += (
            f" Without {some([name for name, _, _ in raised])} the reject threshold would be "
            f"{raised[-1][2]:.5g} instead of {thresholds.image:.5g}."
        )
    remedy = (
        f"Look at them (heatmaps of the most unusual: {run.folder / 'suspects'}). Remove images "
        "that aren't good and train again:"
    )
    yield Weakness(what, remedy, run.train())


def _flagged(run: Run, flagged: int, images: int) -> Iterator[Weakness]:
    """More flagged good images than the thresholds promise."""
    assert run.model.thresholds is not None  # else `of_images` has returned
    promised = run.model.thresholds.to_review.false_rejects
    if compare_flagged(flagged, images, promised) == "more":
        what = (
            f"{flagged} of {counted(images, 'good image')} are flagged "
            f"({percent(flagged / images)}); at most {percent(promised.at_most)} expected for good "
            "parts like the training images."
        )
        remedy = "Let the model learn other good images like these:"
        yield Weakness(what, remedy, run.update())


def _command(*arguments: object) -> str:
    return shlex.join(["anomaly", *map(str, arguments)])


def compare_flagged(flagged: int, images: int, promised: Rate) -> Comparison:
    """Compare the flagged share with the promise: `more`, `fewer` or `as promised`.

    A binomial test against the bounds of the promise, which may be repeated as images come.

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
    """The chance (for many images a bound) that `count` or more of the images are flagged."""
    share = count / images
    if share <= rate:  # or the rate is 1
        return 1.0
    if images <= _MANY:
        return float(binomial(images, rate)[count:].sum())
    divergence = share * math.log(share / rate)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - rate))
    return math.exp(-images * divergence)  # Chernoff's bound


def flagged_line(flagged: int, images: int, promised: Rate, model: str = "RUN") -> str:
    """A warning if more or fewer images are flagged than promised; empty otherwise.

    Args:
        flagged: number of images above the review threshold.
        images: number of images without a reason for review.
        promised: false-reject rate of the review threshold.
        model: the model's folder, for the command.
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
    command = f"anomaly calibrate --model {shlex.quote(model)} --production FOLDER"
    return f"{line}: find thresholds for images like these with {command}"
