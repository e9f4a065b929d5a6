"""What other thresholds would have changed: of production images, of known defects and parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from anomaly.calibration import ThresholdChange
from anomaly.errors import AnomalyError, some
from anomaly.evaluation.recalibrate import HeldOutScores, score_held_out
from anomaly.evaluation.splits import dataset_of
from anomaly.methods.base import Progress
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import find_model
from anomaly.storage.golden import golden_of, read_record


def test_split_defects(
    model: Model, folder: Path, data_root: Path | None, workers: int, progress: Progress
) -> HeldOutScores | None:
    """The defects of the test split that a model is evaluated on, scored; None without any.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.
        data_root: the data sets' folder, where it has moved.
        workers: decoding processes.
        progress: called with (images done, all of them).
    """
    try:
        test = dataset_of(model, folder, data_root).test
        defects = [sample.path for sample in test if sample.is_defect]
        scored = partial(score_held_out, what="defects of the test split", tested=frozenset())
        return scored(model, defects, workers=workers, progress=progress) if defects else None
    except AnomalyError:  # said where good images are kept apart from the test split
        return None


def effects(
    moved: ThresholdChange, scores: Sequence[float], defects: Sequence[float], folder: Path
) -> Iterator[str]:
    """What a change of thresholds would have changed, for people.

    Args:
        moved: the change.
        scores: of the production images.
        defects: of known defects; may be empty.
        folder: the run, or the model folder: golden parts beside it have scores on record.
    """
    for images, done, values in (
        ("production images", "flagged", scores),
        ("known defects", "caught", defects),
    ):
        if values:
            before, after = (
                sum(score > limits.review for score in values)
                for limits in (moved.before, moved.after)
            )
            yield f"of {len(values)} {images} {before} were {done} so far, {after} are now"
    if golden := golden_of(find_model(folder).resolve()):
        parts = read_record(golden)["images"]
        passing = [
            name
            for name, part in parts.items()
            if (score := part["image_score"]) is not None
            and moved.after.review >= score > moved.before.review
        ]
        listed = f": {some(passing)}" if passing else ""
        yield f"of {len(parts)} golden parts {len(passing)} were flagged and would pass{listed}"
