"""The weaknesses of a model, ranked, each with the command that improves it.

They follow from figures that training, evaluation and inference have computed; only a few flagged
images are scored again, turned and mirrored.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.production import Comparison, compare_flagged
from anomaly.calibration.rates import images_needed, percent, supported_rate
from anomaly.errors import ImageError, counted, some
from anomaly.imaging.loading import turned
from anomaly.imaging.read import Image, read_image
from anomaly.scoring.image_statistics import LEAST_IMAGES
from anomaly.training.tuning.judging import LEAST_DEFECTS

if TYPE_CHECKING:
    from anomaly.scoring.pipeline import Model
    from anomaly.scoring.prediction import Prediction

_PRINTED = 3
_TURNS = range(1, 8)
_TURNED_IMAGES = 6  # flagged images that are scored in all ways to lay them
_USUAL = 0.75  # of good images
_LEAST_ALIKE = 3  # images that show a cause; fewer may do so by chance
_TURNED_COPIES = "model.turned_copies=quarter_turns_and_mirrors"
_FAR = 1.1  # times the reject threshold, above which an image is far from all others
_OUTSIDE = 1.1  # times the training images' lowest or highest figure
# Shares of the missed or flagged images that a remedy is expected to correct. Tuning: the mean over
# the five sets of benchmarks/ACCURACY.md (93, 9, 47, -6 and 1 %).
_TUNED, _LEARNED, _FINER = 0.29, 0.5, 0.5
_BY_TUNING = (
    "it helped on 2 of 5 other products (97 % of the defects caught instead of 59 %, and 53 % "
    "instead of 12 %); on 3 it changed little"
)
_BY_CLEANING = (
    "on bottles of MVTec AD with defects among the training images (10 %), 39 of 40 defects "
    "weren't rejected; after removing them, 1 of 40"
)
_BY_TURNING = "with 4 training images of hazelnuts, image AUROC rose from 0.875 to 1.000"


@dataclass(frozen=True)
class Weakness:
    """Something that lets defects pass or flags good parts.

    Attributes:
        what: how many of which images it concerns.
        remedy: what to do about it.
        command: that does so; empty where none does.
        expected: what that brings, where it was measured; else empty.
        gain: share of the defects that are then caught, or of the good parts that are saved.
    """

    what: str
    remedy: str
    command: str = ""
    expected: str = ""
    gain: float = 0.0


@dataclass(frozen=True, eq=False)
class JudgedImage:
    """An image that was scored, as far as weaknesses show in it.

    Attributes:
        flagged: whether it isn't called good.
        source: its file, or the image.
        figures: its brightness, contrast and sharpness.
        is_grey: whether it has no colours.
        is_unlike: whether it is flagged whatever its score: it has a reason for review.
        is_defect: what it shows; None where nobody has said.
        width: of its defect in original pixels, where that is widest; None without a mask.
    """

    flagged: bool
    source: Path | Image = Path()
    figures: Mapping[str, float] = field(default_factory=dict)
    is_grey: bool = False
    is_unlike: bool = False
    is_defect: bool | None = None
    width: float | None = None

    @classmethod
    def of(cls, prediction: Prediction, source: Path | Image) -> JudgedImage:
        """What a prediction says of an image; where it is called good, that alone."""
        if prediction.verdict == "good":
            return _PASSED
        statistics = prediction.statistics
        unlike = bool(prediction.reason)
        return cls(True, source, statistics.figures(), statistics.is_grey, unlike)


_PASSED = JudgedImage(flagged=False)


@dataclass(frozen=True, eq=False)
class Run:
    """A model and the folders that commands about it have to name.

    Attributes:
        model: trained.
        folder: the run, or the model folder, as the user named it.
        record: what its train.json says; empty where there is none.
        tested: options that name the test images; empty for those of its data set.
        production: the folders of production images that it has scored.
    """

    model: Model
    folder: Path
    record: Mapping[str, Any]
    tested: Sequence[object] = ()
    production: Sequence[object] = ("FOLDER",)

    @property
    def is_turnable(self) -> bool:
        """Whether the model can learn turned copies of its images, and hasn't yet."""
        model = self.model
        copies = model.config.model.turned_copies
        return copies != "quarter_turns_and_mirrors" and not (model.region or model.aspect)

    def train(self, *settings: str) -> str:
        """The command that trains a further model, with other settings."""
        overrides = [part for setting in settings for part in ("--set", setting)]
        return _command("train", *self.config(), *overrides, "--output", f"{self._run}_new")

    def tune(self) -> str:
        """The command that tries settings on the known defects."""
        output = f"{self.model.config.name}_tuned.yaml"
        return _command("tune", *self.config(), *self.tested, "--output", output)

    def explain(self, image: Path) -> str:
        """The command that says what would have caught a defect."""
        return _command("explain", image, "--model", self.folder)

    def update(self) -> str:
        """The command that lets the model learn more good images."""
        output = f"{self._run}_updated"
        return _command("update", "--model", self.folder, "--good", "FOLDER", "--output", output)

    def calibrate(self) -> str:
        """The command that finds thresholds with production images."""
        return _command("calibrate", "--model", self.folder, "--production", *self.production)

    @property
    def _run(self) -> Path:
        return self.folder.parent if self.folder.name == "model" else self.folder

    def config(self) -> list[object]:
        """Options that name the settings and the data set that the model was trained with."""
        root = f"data.root={self.record.get('data_folder', 'FOLDER')}"
        whole = ["--set", "data.category=null"] if self.model.config.data.category else []
        folder = self.model.folder or self._run / "model"
        return ["--config", folder / "config.yaml", "--set", root, *whole]


def lines(weaknesses: Sequence[Weakness], name: str = "") -> list[str]:
    """The most important ones, for people; nothing where nothing is weak."""
    if not weaknesses:
        return []
    shown = weaknesses[:_PRINTED]
    more = f", {len(shown)} of {len(weaknesses)}" if len(weaknesses) > len(shown) else ""
    text = [f"{name}{': ' if name else ''}weaknesses, the most important first{more}:"]
    for number, weakness in enumerate(shown, 1):
        text += [f"{number}. {weakness.what}", f"   {weakness.remedy}"]
        text += [f"     {weakness.command}"] if weakness.command else []
        text += [f"   expected: {weakness.expected}"] if weakness.expected else []
    return text


def of_training(run: Run) -> tuple[Weakness, ...]:
    """What training alone shows: images that may be no good ones, and too few of them."""
    return _ranked([*_few(run), *_suspects(run)])


def of_images(run: Run, images: Sequence[JudgedImage]) -> tuple[Weakness, ...]:
    """What the verdicts of a test split, or of production, show.

    Args:
        run: of the model that has scored the images.
        images: none that it has learned from.
    """
    thresholds = run.model.thresholds
    if thresholds is None:
        return ()
    defects = [image for image in images if image.is_defect]
    others = [image for image in images if not image.is_defect]
    missed = [image for image in defects if not image.flagged]
    flagged = [image for image in others if image.flagged]
    passing = [*_missed(run, missed, len(defects)), *_too_coarse(run, missed, len(defects))]
    passing += _few(run) if missed else ()
    promised = thresholds.calibration.review.false_rejects
    comparison = compare_flagged(len(flagged), len(others), promised)
    labelled = any(image.is_defect is not None for image in images)
    unlike = 2 * sum(image.is_unlike for image in flagged) > len(flagged)
    shares = list(
        _flagged_shares(
            run, len(flagged), len(others), comparison, labelled=labelled, unlike=unlike
        )
    )
    finders = (_other_colours, _other_light, _other_poses) if comparison == "more" else ()
    causes = [cause for find in finders for cause in find(run, flagged, len(others))]
    if (labelled or unlike) and causes:  # a cause says more than the share alone
        causes = [replace(cause, what=f"{shares[0].what} {cause.what}") for cause in causes]
        shares = []
    return _ranked([*passing, *causes, *shares])


def _ranked(weaknesses: Sequence[Weakness]) -> tuple[Weakness, ...]:
    return tuple(sorted(weaknesses, key=lambda weakness: -weakness.gain))


def _missed(run: Run, missed: Sequence[JudgedImage], defects: int) -> Iterator[Weakness]:
    if not missed:
        return
    share = len(missed) / defects
    what = f"{len(missed)} of {counted(defects, 'defect')} pass as good ({percent(share)})."
    if defects >= LEAST_DEFECTS and not run.model.config.chosen_by:
        remedy = "Try other settings on the known defects (10 minutes at most):"
        yield Weakness(what, remedy, run.tune(), _BY_TUNING, _TUNED * share)
        return
    files = [image.source for image in missed if isinstance(image.source, Path)]
    why = "The settings are those that tune chose."
    if defects < LEAST_DEFECTS:
        why = f"With {LEAST_DEFECTS} known defects or more, tune can choose settings."
    remedy = f"{why} See why {'the first' if len(files) > 1 else 'it'} passes:"
    yield Weakness(what, remedy, run.explain(files[0]) if files else "", "", _TUNED * share)


def _too_coarse(run: Run, missed: Sequence[JudgedImage], defects: int) -> Iterator[Weakness]:
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
    setting, times = _finer(run.model.config.image, factor, scale)
    remedy = f"Show the network more pixels (about {times:.2g} times the time):"
    gain = _FINER * len(widths) / defects
    yield Weakness(what, remedy, run.train(setting), "", gain)


_FINER_BY = 1.2  # times the pixels a side, below which little is gained


def _finer(image: Any, factor: float, scale: float) -> tuple[str, float]:
    """The setting that makes patches smaller, and what it costs in time.

    Args:
        image: the settings so far.
        factor: how much smaller.
        scale: original pixels for each pixel that the network sees.
    """
    if image.tile is not None:
        return f"image.tile={max(64, round(image.tile / factor))}", factor**2
    if image.resize is not None:
        return f"image.resize={round(image.resize * factor / 32) * 32}", factor**2
    if factor > 2:
        return f"image.tile={round(image.area * scale / factor)}", factor**2
    return f"image.area={round(image.area * factor / 32) * 32}", factor**2


def _few(run: Run) -> Iterator[Weakness]:
    """Too few good images for a review zone: both thresholds lie above the highest score."""
    thresholds = run.model.thresholds
    if thresholds is None or thresholds.label != "calibrated":
        return
    reject, count = thresholds.calibration.reject, thresholds.images
    if reject.supported or reject.target is None or thresholds.review < thresholds.image:
        return
    bound, target = supported_rate(count), percent(reject.target)
    what = (
        f"{counted(count, 'good image')} can't guarantee a false-reject rate below "
        f"{percent(bound)}, so there is no review zone."
    )
    remedy = f"Use {images_needed(reject.target)} images for {target}; a review zone needs 39."
    if count < LEAST_IMAGES:
        remedy += f" With fewer than {LEAST_IMAGES} another product or a lens cap isn't recognised."
    command = ""
    if run.is_turnable:
        remedy += " If parts can lie any way, turned copies of the images help:"
        command = run.train(_TURNED_COPIES)
    expected = _BY_TURNING if command else ""
    yield Weakness(what, remedy, command, expected, bound - reject.target)


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
    look, pronoun = ("looks", "it") if len(names) == 1 else ("look", "them")
    what = f"{counted(len(names), 'training image')} {look} unlike all others: {some(names)}."
    without = raised[-1][2] if raised else thresholds.image
    if raised:
        alone = some([name for name, _, _ in raised]) if len(raised) < len(names) else pronoun
        what += (
            f" Without {alone} the reject threshold would be {without:.5g} instead of "
            f"{thresholds.image:.5g}."
        )
    remedy = (
        f"Look at {pronoun} (heatmaps of the most unusual: {run.folder / 'suspects'}). Remove "
        "images that aren't good and train again:"
    )
    yield Weakness(what, remedy, run.train(), _BY_CLEANING, 1 - without / thresholds.image)


def _flagged_shares(
    run: Run,
    flagged: int,
    images: int,
    comparison: Comparison,
    *,
    labelled: bool,
    unlike: bool,
) -> Iterator[Weakness]:
    """More, or fewer, flagged images than the thresholds promise of good parts."""
    if comparison == "as promised" or run.model.thresholds is None:
        return
    promised = run.model.thresholds.calibration.review.false_rejects
    share = flagged / images
    noun = "good image" if labelled else "image"
    what = f"{flagged} of {counted(images, noun)} are flagged ({percent(share)}); "
    if comparison == "fewer":
        what += f"at least {percent(promised.low)} expected, so defects may pass."
        remedy = "Find lower thresholds with images like these:"
        yield Weakness(what, remedy, run.calibrate(), "", promised.low - share)
        return
    what += f"at most {percent(promised.at_most)} expected for good parts like the training images."
    remedy, command = "Let the model learn other good images like these:", run.update()
    if not labelled and unlike:  # they are flagged whatever the thresholds
        remedy = "If parts look like that from now on, let the model learn confirmed good ones:"
    elif not labelled:
        remedy = (
            "Look at them. If most are defects, the thresholds are right: change nothing. If most "
            "are good parts, find thresholds for images like these:"
        )
        command = run.calibrate()
    yield Weakness(what, remedy, command, "", _LEARNED * (share - promised.at_most))


def _other_light(run: Run, flagged: Sequence[JudgedImage], images: int) -> Iterator[Weakness]:
    """Brightness, contrast or sharpness that most of the flagged images have, and none learned."""
    training = run.model.training_statistics
    if training is None or not training.is_reliable:
        return
    best: tuple[list[float], str] = ([], "")
    for name, (low, high) in training.seen.items():
        values = [image.figures[name] for image in flagged]
        for side, times in (
            ("below", [low / max(value, 1e-6) for value in values]),
            ("above", [value / max(high, 1e-6) for value in values]),
        ):
            outside = [factor for factor in times if factor > _OUTSIDE]
            about = f"{side} the training images' {low:.3g} to {high:.3g}"
            best = max(best, (outside, f"{name} {about}"), key=lambda each: len(each[0]))
    outside, about = best
    if len(outside) < max(_LEAST_ALIKE, len(flagged) / 2):
        return
    what = (
        f"{len(outside)} of {counted(len(flagged), 'flagged image')} have a {about}, by "
        f"{percent(median(outside) - 1)} (median)."
    )
    remedy = (
        "Set lamp, exposure and focus as they were for training. If parts look like that from now "
        "on, let the model learn confirmed good ones:"
    )
    yield Weakness(what, remedy, run.update(), "", len(outside) / images)


def _other_colours(run: Run, flagged: Sequence[JudgedImage], images: int) -> Iterator[Weakness]:
    """Grey images of a model that has learned colours, or the other way round."""
    grey, learned = (run.record.get("images", {}).get(name) for name in ("grey", "learned"))
    if grey not in (0, learned):
        return
    was_grey = grey != 0
    other = sum(image.is_grey is not was_grey for image in flagged)
    if other < _LEAST_ALIKE:
        return
    kinds = ("in colour", "grey") if was_grey else ("grey", "in colour")
    what = (
        f"{other} of {counted(len(flagged), 'flagged image')} are {kinds[0]}, and all training "
        f"images are {kinds[1]}."
    )
    remedy = (
        f"Set the camera to deliver images that are {kinds[1]}, or train with images that are all "
        f"{kinds[0]}:"
    )
    yield Weakness(what, remedy, run.train("data.root=FOLDER"), "", other / images)


def _other_poses(run: Run, flagged: Sequence[JudgedImage], images: int) -> Iterator[Weakness]:
    """Parts that lie in ways which training lacks: turned, they score as most good parts do."""
    if not run.is_turnable:
        return
    flagged = [image for image in flagged if not image.is_unlike]  # these are so by their scores
    step = max(1, len(flagged) // _TURNED_IMAGES)
    tried = [image.source for image in flagged[::step]][:_TURNED_IMAGES]
    usual = sum(_is_usual_turned(run.model, source) for source in tried)
    if usual < max(_LEAST_ALIKE, len(tried) / 2):
        return
    what = (
        f"{usual} of {counted(len(tried), 'flagged image')} score like good parts once they are "
        "turned or mirrored: the training images don't show these poses."
    )
    remedy = "Train with turned copies of the images (the model's size stays the same):"
    yield Weakness(
        what, remedy, run.train(_TURNED_COPIES), "", usual / len(tried) * len(flagged) / images
    )


def _is_usual_turned(model: Model, source: Path | Image) -> bool:
    """Whether some way to lay an image scores as three quarters of good parts do, or less."""
    assert model.thresholds is not None
    loading, usual = model.loading, float(np.quantile(model.thresholds.good.image, _USUAL))
    with suppress(ImageError):
        image = source
        if not isinstance(image, Image):
            image = read_image(image, max_pixels=loading.max_pixels, bit_depth=loading.bit_depth)
        ways = [
            replace(image, pixels=np.ascontiguousarray(turned(image.pixels, turn)))
            for turn in _TURNS
        ]
        results = model.results(ways)
        return any(getattr(result, "score", np.inf) <= usual for result in results)
    return False


def width_of(mask: NDArray[np.bool_]) -> float:
    """How wide a defect is where it is widest, in pixels of its mask (H, W)."""
    return 2 * float(cv2.distanceTransform(mask.astype(np.uint8), cv2.DIST_L2, 3).max())


def _command(*arguments: object) -> str:
    return shlex.join(["anomaly", *map(str, arguments)])
