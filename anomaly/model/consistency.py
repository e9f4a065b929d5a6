"""Do the parts of a model folder belong together?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anomaly.config.schema import Config
from anomaly.errors import ModelError
from anomaly.features.aligner import ADAPTIVE_DIMENSIONS
from anomaly.model.appearance import UsualLook
from anomaly.model.manifest import AGAIN
from anomaly.scorers.padim.gaussian import PatchGaussian
from anomaly.scorers.patchcore.memory_bank import MemoryBank


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
    folder: Path,
    manifest: dict[str, Any],
    config: Config,
    scorer: MemoryBank | PatchGaussian,
    usual: UsualLook | None,
) -> None:
    """See that the scorer is one for the network's embeddings and the manifest's images.

    Raises:
        ModelError: it isn't.
    """
    adaptive = config.model.kind == "patchcore" and config.model.embedding == "adaptive"
    channels = ADAPTIVE_DIMENSIONS if adaptive else sum(manifest["backbone"]["channels"])
    kept = channels
    if isinstance(scorer, PatchGaussian):
        agree(folder, "channels", channels, scorer.projection.dim)
        kept = scorer.projection.dimensions
    else:
        agree(folder, "channels", channels, scorer.vectors.shape[1])
        images = len(manifest["training_images"]) + len(manifest["refused_images"])
        low, high = (int(end) for end in scorer.origins[:, 0].aminmax())
        if low < 0 or high >= images:
            raise ModelError(
                f"{folder}: its memory bank comes from training image {high}, of {images}; {AGAIN}"
            )
    if usual is not None:
        agree(folder, "channels", kept, len(usual.mean))
