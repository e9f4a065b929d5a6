"""Models of one setting that become one: of two lines, or of two lots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from anomaly.calibration import GoodScores, Thresholds, thresholds_from
from anomaly.errors import ModelError
from anomaly.features.exported import ExportedNetwork
from anomaly.model.appearance_model import AppearanceModel
from anomaly.model.build import fitter_of
from anomaly.model.detector import AnomalyDetector
from anomaly.model.settings import MASKS, flat, portable
from anomaly.model.threshold_files import change
from anomaly.model.updating import rates_of, unique_names

# What doesn't touch what is learned; the first model's is taken.
_FREE = ("name", "data.", "batch_size", "memory_limit", "calibration.")


def merge(detectors: Sequence[AnomalyDetector], names: Sequence[str]) -> AnomalyDetector:
    """Join what detectors have learned apart.

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
        raise ModelError("one model is no two to merge; give another one")
    for detector, name in zip(detectors, names, strict=True):
        if isinstance(detector.extractor, ExportedNetwork):
            raise ModelError(f"{name} is exported; merge the models that were exported, and export")
        _check_same(first, detector, f"{names[0]} and {name}")
    numbers, training = _numbered([detector.manifest for detector in detectors])
    scorer = fitter_of(first.config).merged([d.scorer for d in detectors], numbers)
    thresholds = _thresholds(detectors)
    parents = [d.model_id for d in detectors if d.model_id]
    manifest = {**first.manifest, "training_images": training, "refused_images": {}}
    made = change({"merged": list(names)}, first.thresholds, thresholds, {})
    return replace(
        first,
        scorer=scorer,
        thresholds=thresholds,
        appearance=_appearance(detectors),
        manifest=manifest | ({"parents": parents} if parents else {}),
        model_id="",
        folder=None,
        history=b"".join(detector.history for detector in detectors),
        changes=(
            *(one for detector in detectors for one in detector.changes),
            made | {"model_before": " ".join(parents)},
        ),
    )


def _check_same(one: AnomalyDetector, other: AnomalyDetector, names: str) -> None:
    """See that two detectors make the same embeddings, and scores of them.

    Raises:
        ModelError: they don't; names the settings.
    """
    here, there = _settings(one), _settings(other)
    different = [
        f"{key} ({here.get(key)} and {there.get(key)})"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]
    if different:
        raise ModelError(
            f"{names} can't be merged, as they differ in {', '.join(different)}; train them with "
            "the same settings"
        )


def _settings(detector: AnomalyDetector) -> dict[str, Any]:
    """What has to be equal, by key."""
    manifest = detector.manifest
    files = {
        f"{name} (sha256)": manifest["files"].get(name, {}).get("sha256") for name in MASKS.values()
    }
    settings = {k: v for k, v in flat(portable(detector.config)) if not k.startswith(_FREE)}
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
        mine = {name: len(training) + i for i, name in enumerate(new)}
        numbers.append(
            {i: mine.get(name, place[images[name]]) for i, name in zip(old, images, strict=True)}
        )
        training |= zip(unique_names(new, training), new.values(), strict=True)
    return numbers, training


def _thresholds(detectors: Sequence[AnomalyDetector]) -> Thresholds | None:
    known: set[str] = set()
    parts: list[GoodScores] = []
    for detector in detectors:
        if detector.thresholds is None:
            return None
        images, good = detector.manifest["training_images"], detector.thresholds.good
        hashed = [(*row[:3], row[3] or images.get(row[0], "")) for row in good.rows()]
        fresh = [row for row in hashed if row[3] not in known]
        known.update(images.values(), (row[3] for row in hashed if row[3]))
        if fresh:
            parts.append(good.with_rows(fresh))
    joined = reduce(lambda a, b: a.joined(b, ""), parts)
    names = tuple(unique_names(joined.names, ()))
    source = f"{len(names)} good images, each scored by one of the models merged, which hadn't seen"
    return thresholds_from(
        replace(joined, names=names, source=f"{source} it"), *rates_of(detectors[0])
    )


def _appearance(detectors: Sequence[AnomalyDetector]) -> AppearanceModel | None:
    """What the images of all look like; None where it isn't known of one of them."""
    looks = [detector.appearance for detector in detectors]
    known = [one for one in looks if one is not None]
    return reduce(AppearanceModel.merged, known) if len(known) == len(looks) else None
