"""Do the parts of a model folder belong together?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anomaly.errors import ModelError
from anomaly.model.appearance_model import AppearanceModel
from anomaly.model.manifest import AGAIN
from anomaly.scorers.base import ArrayScorer


def agree(folder: Path, what: str, manifest: object, found: object) -> None:
    """See that a manifest and the files beside it say the same.

    Raises:
        ModelError: they don't.
    """
    if manifest != found:
        raise ModelError(
            f"{folder}: {what} is {manifest!r} in its manifest, and {found!r} in its other files; "
            f"{AGAIN}"
        )


def check_together(
    folder: Path, manifest: dict[str, Any], scorer: ArrayScorer, appearance: AppearanceModel | None
) -> None:
    """See that the scorer is one for the network's embeddings and the manifest's images.

    Raises:
        ModelError: it isn't.
    """
    images = len(manifest["training_images"]) + len(manifest["refused_images"])
    try:
        scorer.check_origin(sum(manifest["backbone"]["channels"]), images)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}; {AGAIN}") from None
    if appearance is not None:
        agree(folder, "channels", scorer.dimensions, len(appearance.mean))
