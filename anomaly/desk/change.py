"""A changed model and the model that it replaces: verdicts of known parts, before and after."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from anomaly.calibration.rates import Rate, rate_above
from anomaly.calibration.thresholds import ThresholdChange, Thresholds
from anomaly.datasets.inputs import check_inputs, find_inputs
from anomaly.datasets.samples import Sample
from anomaly.desk.golden import golden_samples
from anomaly.errors import AnomalyError, DataError, counted, first_of, some
from anomaly.evaluation.evaluate import dataset_of
from anomaly.imaging.arrays import ImageLike, is_one, source_of
from anomaly.imaging.read import DEFAULT, Decoding, described
from anomaly.runtime import StageProgress
from anomaly.scoring.model import Model, Scored, score
from anomaly.storage.thresholds import history_images

log = logging.getLogger(__name__)

DEFECTS, GOOD, GOLDEN = "known defects", "known good parts", "golden parts"
PRODUCTION = "production images"
_LISTED = 10  # changed verdicts of a kind that lines name


@dataclass(frozen=True, eq=False)
class Change:
    """A new version of a model, not saved yet, beside the present one.

    Attributes:
        before: the present model.
        after: the new version.
        verdicts: verdicts of known parts by both models.
        notes: the steps taken, a line each, for people.
        doubts: reasons why a person has to agree first.
        refused: reasons why given images are unusable.
    """

    before: Model
    after: Model
    verdicts: Verdicts
    notes: Sequence[str] = ()
    doubts: Sequence[str] = ()
    refused: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Lines for people: the steps taken, the thresholds, and the verdicts that change."""
        old, new = self.before.thresholds, self.after.thresholds
        lines = [*self.notes, *(new.lines() if new else ())]
        lines += ThresholdChange(old, new).lines() if old and new else ()
        return [*lines, *self.verdicts.lines()]

    def accept(self, *, force: bool) -> Model:
        """Log what changes, and return the new version.

        Raises:
            DataError: there are doubts, and `force` is false.
        """
        for line in self.lines():
            log.info(line)
        if self.doubts and not force:
            doubts = "; ".join(self.doubts)
            raise DataError(f"{doubts}; leave out images that aren't good, or give force=True")
        return self.after


@dataclass(frozen=True)
class Compared:
    """Verdicts and scores of one image before and after a change.

    Attributes:
        sample: the image.
        before: the verdict before the change.
        after: the verdict after it.
        scores: the scores before and after.
    """

    sample: Sample
    before: str
    after: str
    scores: tuple[float, float]

    @property
    def newly_passes(self) -> bool:
        """True if the image is caught before the change and called good after it."""
        return is_flagged(self.before) and self.after == "good"

    def __str__(self) -> str:
        # One score where the two show the same digits.
        scores = " -> ".join(dict.fromkeys(f"{score:.4g}" for score in self.scores))
        return f"{self.sample.name}: {self.before} -> {self.after} ({scores})"


def is_flagged(verdict: str) -> bool:
    """True for the verdicts review and reject."""
    return verdict in ("review", "reject")


@dataclass(frozen=True, eq=False)
class Verdicts:
    """Verdicts of known parts before and after a change.

    Attributes:
        compared: images with a score, by kind: `DEFECTS`, `GOOD`, `GOLDEN`, `PRODUCTION` or
            another.
    """

    compared: Mapping[str, Sequence[Compared]]

    def of(self, *kinds: str) -> list[Compared]:
        """The images of some kinds, in the order of the kinds."""
        return [image for kind in kinds for image in self.compared.get(kind, ())]

    def defects_found(self, limits: Thresholds, defects: Iterable[Sample]) -> dict[str, Rate]:
        """Rates of given defects that new thresholds reject and catch; empty without any."""
        # The other known defects come from golden parts and the test split.
        given = {defect.path for defect in defects}
        scores = [image.scores[1] for image in self.of(DEFECTS) if image.sample.path in given]
        chosen = limits.label != "calibrated"  # set by hand, perhaps with these defects in view
        borders = {"rejected": limits.image, "caught": limits.review} if scores else {}
        return {name: rate_above(scores, value, chosen=chosen) for name, value in borders.items()}

    @property
    def refusal(self) -> str:
        """Reason to ask a person: defects that are caught now would pass; empty without any.

        Defects that stay missed are no reason. Production images that the present model rejects
        count as defects, because nobody has judged them.
        """
        lost = [image for image in self.of(DEFECTS) if image.newly_passes]
        unjudged = [image for image in self.of(PRODUCTION) if image.newly_passes]
        unjudged = [image for image in unjudged if image.before == "reject"]
        passing = [(lost, "known defect", "caught"), (unjudged, "unjudged image", "rejected")]
        return "; ".join(
            f"{counted(len(images), noun)} now {verdict} would be called good "
            f"({some([image.sample.name for image in images])})"
            for images, noun, verdict in passing
            if images
        )

    @property
    def unlike(self) -> str:
        """Sign of another product: the new model flags most parts now called good; else empty."""
        good = [image for image in self.of(GOOD, GOLDEN) if image.before == "good"]
        flagged = sum(is_flagged(image.after) for image in good)
        if 2 * flagged <= len(good):  # a worse model flags some, another product's nearly all
            return ""
        return (
            f"the new model flags {flagged} of {counted(len(good), 'part')} that the present model "
            "calls good: another product?"
        )

    def lines(self) -> Iterator[str]:
        """Lines for people: numbers caught or flagged, changed verdicts, and missed defects."""
        for kind, images in self.compared.items():
            if not images:
                continue
            before = sum(is_flagged(image.before) for image in images)
            after = sum(is_flagged(image.after) for image in images)
            verb = "caught" if kind == DEFECTS else "flagged"
            yield f"{kind} {verb}: {before} of {len(images)} before, {after} after"
            changed = [image for image in images if image.before != image.after]
            # Images that newly pass come first.
            changed.sort(key=lambda image: (not image.newly_passes, image.sample.name))
            yield from (f"  {image}" for image in first_of([*map(str, changed)], most=_LISTED))
        if missed := sum(image.before == image.after == "good" for image in self.of(DEFECTS)):
            yield f"Still missed, as before: {missed}."
        if not self.of(DEFECTS):
            yield (
                "No known defects to compare, so nobody knows if defects are still caught; keep "
                "some with anomaly explain --keep"
            )


def verdicts_of(
    before: Model,
    after: Model,
    known: Mapping[str, Sequence[Sample]],
    *,
    progress: StageProgress = lambda stage, done, total: None,
) -> Verdicts:
    """Verdicts of images by both models, by kind; the log names images that can't be scored."""
    compared = {}
    for kind, samples in known.items():
        old = new = score(before, samples, progress=partial(progress, kind))
        for image in old:
            if image.score is None:
                log.warning("skipped: %s", image.reason)
        if after.scorer is not before.scorer:  # else scores are equal, only thresholds differ
            new = score(after, samples, progress=partial(progress, kind))
        compared[kind] = compare(old, new, (before.thresholds, after.thresholds))
    return Verdicts(compared)


def compare(
    before: Sequence[Scored],
    after: Sequence[Scored],
    limits: tuple[Thresholds | None, Thresholds | None],
) -> list[Compared]:
    """Verdicts of scored images before and after a change; those without a score are left out."""
    return [
        Compared(old.sample, old.verdict(limits[0]), new.verdict(limits[1]), (old.score, new.score))
        for old, new in zip(before, after, strict=True)
        if old.score is not None and new.score is not None
    ]


def replacement(
    before: Model, after: Model, progress: StageProgress = lambda stage, done, total: None
) -> Change:
    """A model from elsewhere, compared with the model that it is to replace.

    Doubts: defects would pass, or the new model is one of another product.
    """
    verdicts = verdicts_of(before, after, known_parts([before, after]), progress=progress)
    doubts = [verdicts.refusal, verdicts.unlike or _unlike_training(before, after)]
    return Change(before, after, verdicts, doubts=[doubt for doubt in doubts if doubt])


def _unlike_training(before: Model, after: Model) -> str:
    """Sign of another product: two models have learned different parts; empty if alike."""
    new, old = after.training_statistics, before.training_statistics
    same = after.manifest["backbone"] == before.manifest["backbone"]  # else features differ
    if new is None or old is None or not same or new.resembles(old):
        return ""
    return "the new model has learned other parts than the present model: another product?"


def known_parts(models: Sequence[Model], defects: Iterable[Sample] = ()) -> dict[str, list[Sample]]:
    """The parts that somebody has judged, by kind, each once by content.

    Args:
        models: models whose golden parts and test splits count.
        defects: further defects.
    """
    # A part of several kinds counts where its kind comes first: defects, then the test split.
    golden = [sample for model in models for sample in golden_samples(model.folder)]
    test = [sample for model in models for sample in _test_split_of(model)]
    kinds = {
        DEFECTS: [*defects, *(part for part in [*golden, *test] if part.is_defect)],
        GOOD: [sample for sample in test if not sample.is_defect],
        GOLDEN: [part for part in golden if not part.is_defect],
    }
    hashes: set[str] = set()
    parts: dict[str, list[Sample]] = {kind: [] for kind in kinds}
    for kind, samples in kinds.items():
        for sample in samples:
            sha256 = sample.sha256
            if sha256 not in hashes:
                parts[kind].append(sample)
            hashes |= {sha256} - {""}  # unreadable files stay, to be reported
    return parts


def _test_split_of(model: Model) -> Sequence[Sample]:
    """The test split of a model's run; empty if unsaved or, with a warning, if not to be opened."""
    if model.folder is None:
        return ()
    try:
        return dataset_of(model).test
    except AnomalyError as error:
        log.warning(
            "the test split isn't compared; make sure that these images aren't part of it: %s",
            error,
        )
        return ()


def new_images(
    model: Model,
    samples: Sequence[Sample],
    name: str,
    known: Mapping[str, Sequence[Sample]],
    *,
    defects: Iterable[Sample] = (),
    unsorted: bool = False,
) -> list[Sample]:
    """Images that a model doesn't know, each once, to learn from or to find thresholds with.

    Unreadable images stay, to be reported. A warning says how many are left out, and why.

    Args:
        model: the trained model.
        samples: the images.
        name: name of the images in messages: `good images`.
        known: parts of the test split and other known parts, from `known_parts`.
        defects: known defects, none of which may be among the images.
        unsorted: True if nobody has judged the images; those that an earlier calibration took as
            defects are left out, too.

    Raises:
        DataError: an image is given as a defect, too; or none is left.
    """
    bad = {defect.sha256 for defect in defects} - {""}
    parts = {part.sha256 for part in [*known[DEFECTS], *known[GOOD]]}
    known_hashes: dict[str, set[str]] = {  # sha256 by the reason to leave an image out
        "that the model has learned from": set(model.manifest["training_images"].values()),
        "of the test split or known as defects": parts | history_images(model, "defects"),
        "taken as defects before": history_images(model, "taken as defects") if unsorted else set(),
        "that are copies of others": set(),
    }
    kept: list[Sample] = []
    left_out: Counter[str] = Counter()
    for sample in samples:
        sha256 = sample.sha256
        if sha256 in bad:
            raise DataError(f"{sample.path} is given as good and as a defect; give it once")
        reasons = [why for why, hashes in known_hashes.items() if sha256 and sha256 in hashes]
        left_out.update(reasons[:1])  # counted once, under the first reason
        if not reasons:
            kept.append(sample)
        known_hashes["that are copies of others"].add(sha256)
    numbers = ", ".join(
        f"{left_out[reason]} {reason}" for reason in known_hashes if left_out[reason]
    )
    if not kept:
        raise DataError(f"none of {len(samples)} {name} can be used: {numbers}; give others")
    if numbers:
        log.warning("%s left out: %s", name, numbers)
    return kept


def samples_of(
    images: str | os.PathLike[str] | Iterable[ImageLike | Sample],
    name: str,
    decoding: Decoding = DEFAULT,
    *,
    defects: bool | None = False,
) -> list[Sample]:
    """Samples to learn from, to calibrate or to compare with.

    Files are named by their place below the folder that holds all, and come last; pixels are named
    by their place in the list; samples stay as they are.

    Args:
        images: a folder, a file, pixels, or a collection of these and of samples.
        name: name of the images, or their option, for messages.
        decoding: most pixels, and significant bits of integers.
        defects: True if all images show defects, False if all show good parts; files and folders
            whose names contradict this are refused. None if nobody has sorted the images.

    Raises:
        DataError: there is no image, or a name contradicts `defects`.
        ImageError: an image can't be used; says which and why.
    """
    samples: list[Sample] = []
    files: list[Path] = []  # listed together, so that names lead from the folder that holds all
    single = isinstance(images, str | os.PathLike) or is_one(images)
    given: Iterable[Any] = [images] if single else cast(Iterable[Any], images)
    for index, image in enumerate(given):
        source = image if isinstance(image, Sample) else source_of(image, decoding, index)
        if isinstance(source, Sample):
            samples.append(source)
        elif isinstance(source, Path):
            files.append(source)
        else:
            samples.append(Sample(Path(described(index)), described(index), image=source))
    if files:
        paths = find_inputs(files, option=name).paths
        if defects is not None:
            check_inputs(files, paths, defects=defects)
        folders = [path if path.is_dir() else path.parent for path in files]
        common = os.path.commonpath([path.absolute() for path in folders])
        samples += [Sample(path, path.absolute().relative_to(common).as_posix()) for path in paths]
    if not samples:
        raise DataError(f"no {name} were given")
    return samples
