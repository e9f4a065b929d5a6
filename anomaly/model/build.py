"""The stages as a config wants them. Imports torch only where a stage computes with it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from anomaly.config.methods import METHODS
from anomaly.config.schema import Config
from anomaly.errors import ConfigError, ModelError
from anomaly.model.settings import loading_of
from anomaly.scorers.base import ArrayScorer, Fitter, Scorer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anomaly.features.extractor import FeatureExtractor
    from anomaly.features.truncation import Truncated


def backbone(config: Config, device: torch.device) -> tuple[FeatureExtractor, str | None]:
    """The truncated backbone that a config names, in fp32, and the hash of its weights' file.

    Raises:
        AnomalyError: the weights or layers can't be used as configured.
    """
    from anomaly.features.backbone_weights import load_state, read_weights
    from anomaly.features.backbones import build, default_layers
    from anomaly.features.truncation import truncate

    name = config.backbone.name
    full = build(name)
    layers = config.backbone.layers or default_layers(name, full, METHODS[config.model.kind].stages)
    truncated = truncate(build(name), layers)
    _check_size(config, truncated)
    state, sha256 = read_weights(name, config.backbone.weights, config.seed)
    load_state(truncated.network, state, full, f"the weights file for backbone.name {name}")
    return truncated.extractor().to(device, "fp32"), sha256


def _check_size(config: Config, truncated: Truncated) -> None:
    """See that a network takes images of the sizes that a config gives them.

    Raises:
        ConfigError: it doesn't; the message says what it takes.
    """
    import torch

    from anomaly.features.extractor import check_side
    from anomaly.features.layer_table import takes
    from anomaly.features.truncation import probes

    image, extractor = config.image, truncated.extractor()
    key = next((key for key in ("crop", "resize") if getattr(image, key)), "area")
    side: int = getattr(image, key)
    height = width = side
    if key == "area":
        sizing = loading_of(config, extractor.coarsest_stride, None, None, extractor.patch).sizing
        # Whatever squares it divides its maps into, one of two neighbouring multiples won't fit.
        height = max(1, round(side / sizing.multiple)) * sizing.multiple
        width = height if image.tile else height + sizing.multiple
    else:
        check_side(f"image.{key}", side, truncated.layouts)
    with torch.device("meta"):
        if takes(truncated.network, height, width, truncated.layers):
            return
        fits = [
            s for s in probes(truncated.network) if takes(truncated.network, s, s, truncated.layers)
        ]
    best = min(fits, key=lambda fit: abs(fit - side))
    remedy = "resize" if key == "area" and not image.tile else key
    raise ConfigError(
        f"{config.backbone.name} doesn't take images of {height}×{width}, which image.{key}={side} "
        f"gives; set image.{remedy}={best}, for it takes {best}×{best}"
    )


def fitter_of(config: Config) -> Fitter[Any]:
    """What a config learns with."""
    settings = config.model.model_dump()
    limit = config.memory_limit * 1024**2
    made: Fitter[Any] = _method(config).fitter(settings, seed=config.seed, memory_limit=limit)
    return made


def scorer_of(config: Config, tensors: dict[str, Tensor], device: torch.device) -> Scorer:
    """What a config's method learned and saved.

    Args:
        config: all settings.
        tensors: as `Scorer.tensors` gave them.
        device: where the scorer goes.

    Raises:
        ModelError: the tensors aren't those of the method.
    """
    settings, cache = config.model.model_dump(), _cache_folder()
    made: Scorer = _method(config).scorer(tensors, settings, device=device, cache=cache)
    return made


def array_scorer_of(config: Config, tensors: dict[str, NDArray[Any]]) -> ArrayScorer:
    """What a config's method learned and saved, for an exported network: works on arrays.

    Args:
        config: all settings.
        tensors: as `Scorer.tensors` gave them.

    Raises:
        ModelError: the tensors aren't those of the method, or it has no such form.
    """
    method = METHODS[config.model.kind]
    if not method.arrays:
        raise ModelError(f"{method.title} computes with torch alone, so it can't be exported")
    made: ArrayScorer = import_module(method.arrays).scorer(tensors, config.model.model_dump())
    return made


def _method(config: Config) -> Any:
    return import_module(METHODS[config.model.kind].module)


def _cache_folder() -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/anomaly`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "anomaly"
