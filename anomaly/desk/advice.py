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
from anomaly.desk.judging import LEAST_DEFECTS
from anomaly.errors import counted, some
from anomaly.files.tables import text_table
from anomaly.scoring.image_statistics import LEAST_IMAGES

if TYPE_CHECKING:
    from anomaly.config.schema import Config
    from anomaly.scoring.model import Model
    from anomaly.scoring.prediction import Scored

_PRINTED = 3
_RATES = (0.02, 0.05, 0.1, 0.2)  # of good parts for review
_LEAST_ALIKE = 3  # images that stand out; fewer may do so by chance
_FAR = 1.1  # times the reject threshold, above which an image is far from all others
_FINER_BY = 1.2  # times the pixels a side, below which little is gained
LEAST_PARTS = 20  # fewer say nothing of a rate
DEFECT_SHARE = 0.01  # of the parts on a line, where nobody says otherwise
# Of a comparison that finds a difference where there is none. Made anew with each of 2,000 parts,
# some 3 % of lines meet one: bounds of the promise are seldom so far off.
_CHANCE = 0.01
_MANY = 2000  # images from which on the chance is bounded, in no time

Comparison = Literal["as promised", "more", "fewer"]


@dataclass(frozen=True)
class Weakness:
    """Something that lets defects pass or flags good parts.

    Attributes:
        what: how many of which images it concerns.
        remedy: what to do about it.
        command: that does so; empty where none does.
    """

    what: str
    remedy: str
    command: str = ""


@dataclass(frozen=True, eq=False)
class Run:
    """A model and the folders that commands about it have to name.

    Attributes:
        model: trained.
        folder: the run, or the model folder, as the user named it.
        record: what its train.json says; empty where there is none.
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
        run: of the model that has scored the images.
        images: none that it has learned from.
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
    """A table of what other review rates would do to a test split, and the command for one.

    Thresholds come from the good images that the model's do; the test images only measure them.

    Args:
        run: of the model that has scored the images.
        images: none that it has learned from.

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
        flagged = [one for one in images if one.verdict(new) in ("review", "reject")]
        caught = sum(one.sample.is_defect for one in flagged)
        counts[rate] = caught, len(flagged) - caught
    defects = sum(one.sample.is_defect for one in images if one.score is not None)
    good = sum(not one.sample.is_defect for one in images if one.score is not None)
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
    if defects >= LEAST_DEFECTS and not run.model.config.chosen_by:
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
    assert run.model.thresholds is not None  # `of_images` has seen to it
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

    A binomial test against the bounds of the promise. It may be asked again as images come.

    Args:
        flagged: images above a threshold.
        images: all of them without a reason for review.
        promised: what the threshold does to good parts.
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
    """The chance (for many images a bound) that so many or more images are flagged."""
    share = count / images
    if share <= rate:  # or the rate is 1
        return 1.0
    if images <= _MANY:
        return float(binomial(images, rate)[count:].sum())
    divergence = share * math.log(share / rate)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - rate))
    return math.exp(-images * divergence)  # Chernoff's bound


def flagged_line(
    flagged: int, images: int, promised: Rate, model: str = "RUN", *, all_good: bool = False
) -> str:
    """A warning if more or fewer images are flagged than promised; empty otherwise.

    Args:
        flagged: number of images that are flagged.
        images: number of all scored images.
        promised: share of good parts that the review threshold flags.
        model: the model's folder, for the command.
        all_good: whether somebody has said that none of the images is defective.
    """
    comparison = compare_flagged(flagged, images, promised)
    if comparison == "as promised":
        return ""
    line = f"{flagged} of {images} images flagged ({percent(flagged / images)}); "
    line += f"{percent(promised.expected)} expected, at "
    if comparison == "fewer":
        line += f"least {percent(promised.low)}. These thresholds let defects pass"
    else:
        line += f"most {percent(promised.at_most)} of good parts. "
        if not all_good:
            line += "Look at them first: if most are defects, change nothing. If most are good, "
        line += f"{'T' if all_good else 't'}hese images differ from the training images"
    command = f"anomaly calibrate --model {shlex.quote(model)} --production FOLDER"
    return f"{line}: find thresholds for images like these with {command}"
