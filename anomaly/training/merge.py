"""Models of one setting that become one: of two lines, or of two lots."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from anomaly.backbones.engine import ExportedNetwork
from anomaly.calibration import GoodScores, Thresholds, thresholds_from
from anomaly.calibration.rates import percent
from anomaly.errors import ModelError
from anomaly.imaging.reference import Reference
from anomaly.scoring.build import MASKS, differences, fitter_of, flatten, to_dict
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.pipeline import Model
from anomaly.storage.thresholds import change
from anomaly.training.update import unique_names

log = logging.getLogger(__name__)

# What doesn't touch what is learned; the first model's is taken.
_FREE = ("name", "data.", "batch_size", "memory_limit", "calibration.")


def merge(detectors: Sequence[Model], names: Sequence[str]) -> Model:
    """Merge detectors into one.

    The thresholds come from the scores that each of them knows, by detectors that knew less than
    the new one: what a detector knows better, it scores lower.

    Args:
        detectors: two or more of one setting; they stay as they are.
        names: what messages call them.

    Returns:
        The detector, not saved yet. Without thresholds where one of them has none.

    Raises:
        ModelError: one is exported, settings differ, or the method can't join them.
    """
    first = detectors[0]
    if len(detectors) < 2:
        raise ModelError("merging takes two models or more; give another one")
    for detector, name in zip(detectors, names, strict=True):
        if isinstance(detector.extractor, ExportedNetwork):
            raise ModelError(f"{name} is exported; merge the models that were exported, and export")
        if detector.arrangement is not None:
            raise ModelError(f"{name} has model.arrangement, which can't be merged; train again")
        _check_same(first, detector, f"{names[0]} and {name}")
    numbers, training = _numbered([detector.manifest for detector in detectors])
    scorer = fitter_of(first.config).merged([d.scorer for d in detectors], numbers)
    thresholds = _thresholds(detectors, names)
    parents = [d.model_id for d in detectors if d.model_id]
    manifest = {**first.manifest, "training_images": training, "refused_images": {}}
    entry = change({"merged": list(names)}, first.thresholds, thresholds, {})
    return replace(
        first,
        scorer=scorer,
        thresholds=thresholds,
        training_statistics=_training_statistics(detectors, len(training)),
        manifest=manifest | ({"parents": parents} if parents else {}),
        model_id="",
        folder=None,
        history=b"".join(detector.history for detector in detectors),
        changes=(
            *(earlier for detector in detectors for earlier in detector.changes),
            entry | {"model_before": " ".join(parents)},
        ),
    )


def _check_same(one: Model, other: Model, names: str) -> None:
    """Refuse detectors with different embeddings or scores.

    Raises:
        ModelError: they don't; names the settings.
    """
    if not _one_reference(one.reference, other.reference):
        raise ModelError(
            f"{names} can't be merged, as their parts lie in other poses (image.align); train one "
            "model with the images of both"
        )
    if different := differences(_settings(one), _settings(other), "{key} ({one} and {other})"):
        raise ModelError(
            f"{names} can't be merged, as they differ in {', '.join(different)}; train them with "
            "the same settings"
        )


def _one_reference(one: Reference | None, other: Reference | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one.picture, other.picture)


def _settings(detector: Model) -> dict[str, Any]:
    """The settings that must be equal, by key."""
    manifest = detector.manifest
    files = {
        f"{name} (sha256)": manifest["files"].get(name, {}).get("sha256") for name in MASKS.values()
    }
    settings = {k: v for k, v in flatten(to_dict(detector.config)) if not k.startswith(_FREE)}
    backbone = {f"backbone.{key}": value for key, value in manifest["backbone"].items()}
    return {**settings, **backbone, **files, "aspect": detector.aspect}


def _numbered(
    manifests: Sequence[Any],
) -> tuple[list[dict[int, int]], dict[str, str]]:
    """The new number of each training image by its old one, for each model; all images' hashes."""
    training: dict[str, str] = {}
    place: dict[str, int] = {}  # by hash
    numbers = []
    for manifest in manifests:
        unused = frozenset(manifest["refused_images"].values())
        images = manifest["training_images"]
        old = [i for i in range(len(images) + len(unused)) if i not in unused]
        new = {name: sha256 for name, sha256 in images.items() if sha256 not in place}
        # Copies of one image within a model were learned from, each.
        place |= {s: len(training) + i for i, s in reversed(list(enumerate(new.values())))}
        own = {name: len(training) + i for i, name in enumerate(new)}
        numbers.append(
            {i: own.get(name, place[images[name]]) for i, name in zip(old, images, strict=True)}
        )
        training |= zip(unique_names(new, training), new.values(), strict=True)
    return numbers, training


def _thresholds(detectors: Sequence[Model], names: Sequence[str]) -> Thresholds | None:
    """Thresholds from the scores of all detectors; None if one has no thresholds.

    An image that somebody has left out of one is left out. Each image counts once.
    """
    goods: list[GoodScores] = []
    for detector in detectors:
        if detector.thresholds is None:
            return None
        goods.append(_hashed(detector.thresholds.good, detector.manifest["training_images"]))
    _warn_of_other_thresholds(detectors, names)
    left_out = {o.sha256 or (i, o.name): o for i, good in enumerate(goods) for o in good.left_out}
    known, parts = {key for key in left_out if isinstance(key, str)}, []
    for detector, good in zip(detectors, goods, strict=True):
        fresh = [row for row in good.rows() if row[3] not in known]
        known.update(detector.manifest["training_images"].values(), good.hashes)
        known.discard("")
        if fresh:
            parts.append(replace(good.with_rows(fresh), left_out=()))
    if not parts:
        raise ModelError(
            "no good image is left for thresholds, because each was left out by hand in one of "
            "the models; give the models other thresholds first (anomaly calibrate)"
        )
    joined = reduce(lambda a, b: a.joined(b, ""), parts)
    unique = unique_names([*joined.names, *(out.name for out in left_out.values())], ())
    count = len(joined.names)
    source = f"{count} good images, each scored by a merged model that hadn't seen it"
    out = [
        image._replace(place=count + i, name=unique[count + i])
        for i, image in enumerate(left_out.values())
    ]
    good = replace(joined, names=tuple(unique[:count]), source=source, left_out=tuple(out))
    return thresholds_from(good, *detectors[0].rates())


def _hashed(good: GoodScores, images: Mapping[str, str]) -> GoodScores:
    """Scores whose images' hashes are known, those left out included, as far as they can be."""
    rows = [
        (name, image, peak, sha256 or images.get(name, ""), zones)
        for name, image, peak, sha256, zones in good.rows()
    ]
    out = (o._replace(sha256=o.sha256 or images.get(o.name, "")) for o in good.left_out)
    return replace(good.with_rows(rows), left_out=tuple(out))


def _warn_of_other_thresholds(detectors: Sequence[Model], names: Sequence[str]) -> None:
    """Warn of thresholds that were set in another way than the new ones."""
    wanted = detectors[0].rates()
    for detector, name in zip(detectors, names, strict=True):
        assert detector.thresholds is not None
        if detector.thresholds.label != "calibrated":
            log.warning(
                "%s: its thresholds were found %s; those of the merged model are found by rates",
                name,
                detector.thresholds.label,
            )
        elif (rates := detector.rates()) != wanted:
            log.warning(
                "%s: its thresholds flag %s of good parts and reject %s; those of the merged "
                "model flag %s and reject %s, like those of %s",
                name,
                *map(percent, (*rates, *wanted)),
                names[0],
            )


def _training_statistics(detectors: Sequence[Model], images: int) -> TrainingStatistics | None:
    """The joint image statistics; None if one model has none.

    Args:
        detectors: those to merge.
        images: how many they have learned from; one that several have learned from counts once,
            though it weighs as many times in the mean.
    """
    known = [d.training_statistics for d in detectors if d.training_statistics is not None]
    if len(known) < len(detectors):
        return None
    return replace(reduce(TrainingStatistics.merged, known), images=images)
