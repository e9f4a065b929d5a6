"""Networks of torchvision by name: how they are made, their layers and their official weights."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, cast

import torchvision
from torch import Tensor, nn

from anomaly.backbones import timm_networks
from anomaly.backbones.timm_networks import INSTALLED
from anomaly.backbones.weights import official_file, official_state
from anomaly.errors import ConfigError, WeightsError, nearest

log = logging.getLogger(__name__)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Networks whose official weights come from TensorFlow, where inputs lie in [−1, 1].
_FROM_TENSORFLOW = ("googlenet", "inception_v3")

# Layers at strides 4, 8 and 16, by the family's class in torchvision, or the network's name.
# PatchCore takes the last two, PaDiM all three. VGG differs by depth: see `_stages`. AlexNet,
# Inception and SqueezeNet have none: without padding, their maps aren't a whole stride apart.
_STAGES: dict[str, tuple[str, str, str]] = {
    "ConvNeXt": ("features.1", "features.3", "features.5"),
    "DenseNet": ("features.denseblock1", "features.denseblock2", "features.denseblock3"),
    "EfficientNet": ("features.2", "features.3", "features.5"),
    "GoogLeNet": ("conv3", "inception3b", "inception4e"),
    "MNASNet": ("layers.8", "layers.9", "layers.11"),
    "MaxVit": ("blocks.0", "blocks.1", "blocks.2"),
    "MobileNetV2": ("features.3", "features.6", "features.13"),
    "RegNet": ("trunk_output.block1", "trunk_output.block2", "trunk_output.block3"),
    "ResNet": ("layer1", "layer2", "layer3"),
    "ShuffleNetV2": ("maxpool", "stage2", "stage3"),
    "SwinTransformer": ("features.1", "features.3", "features.5"),
    "mobilenet_v3_large": ("features.3", "features.6", "features.12"),
    "mobilenet_v3_small": ("features.1", "features.3", "features.8"),
}


def known_backbones() -> list[str]:
    """The names that `make` takes: torchvision's own classifiers, and `resnet50_v1`."""
    return sorted([*torchvision.models.list_models(module=torchvision.models), "resnet50_v1"])


def make(name: str) -> nn.Module:
    """A network with random weights.

    Raises:
        ConfigError: no such network.
    """
    if name not in known_backbones():
        raise ConfigError(
            f"backbone.name {name!r} isn't a network; {nearest(name, known_backbones())}"
        )
    # They carry heads for training, and would normalise their input again, see `mean_and_std`.
    extra: dict[str, Any] = {}
    if name in _FROM_TENSORFLOW:
        extra = {"aux_logits": True, "transform_input": False, "init_weights": True}
    # Of `resnet50_v1` torchvision knows the newer form only.
    original = name == "resnet50_v1"
    network = torchvision.models.get_model("resnet50" if original else name, weights=None, **extra)
    if original:
        _stride_in_first_convolution(network)
    return cast(nn.Module, network)


def _stride_in_first_convolution(network: nn.Module) -> None:
    """He et al.'s original bottleneck: the stride sits on the first 1×1, not on the 3×3."""
    for stage in ("layer2", "layer3", "layer4"):
        block = network.get_submodule(f"{stage}.0")
        first, second = block.get_submodule("conv1"), block.get_submodule("conv2")
        assert isinstance(first, nn.Conv2d)
        assert isinstance(second, nn.Conv2d)
        first.stride, second.stride = second.stride, first.stride


def stages(name: str, network: nn.Module) -> tuple[str, ...]:
    """The layers at strides 4, 8 and 16; empty where none are known."""
    if type(network).__name__ == "VGG":
        pools = [
            i
            for i, layer in enumerate(network.get_submodule("features").children())
            if isinstance(layer, nn.MaxPool2d)
        ]
        return tuple(f"features.{i - 1}" for i in pools[2:5])
    return _STAGES.get(name) or _STAGES.get(type(network).__name__) or ()


def mean_and_std(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a network's official weights were trained with, for each channel of RGB in [0, 1]."""
    if name in _FROM_TENSORFLOW:
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    weights = official_weights(name)
    if weights is None:
        return IMAGENET_MEAN, IMAGENET_STD
    preset = weights.transforms()
    return tuple(preset.mean), tuple(preset.std)


# For anomalies, the best first; the first is that of the papers.
_BEST = ("wide_resnet50_2", "resnet50")


def official_weights(name: str) -> Any | None:
    """Torchvision's enum member for `imagenet`: the first release, the one the papers used.

    None for a network that torchvision publishes no weights for, or doesn't have.
    """
    if name == "resnet50_v1" or name not in known_backbones():
        return None
    members = list(torchvision.models.get_model_weights(name))
    return next((m for m in members if m.name == "IMAGENET1K_V1"), members[0])


def backbone_at_hand() -> tuple[str, str]:
    """The best network whose weights are on disk or can be downloaded, and why that one.

    Raises:
        WeightsError: none is; the message says what to do.
    """
    best = _BEST[0]
    files = [_file_name(name) for name in _BEST]
    try:
        official_file(official_weights(best).url)  # type: ignore[union-attr]
    except WeightsError as error:
        log.debug("%s", error)
        name = other_on_disk(best)
        if name is None:
            raise
        origin = "came with the installation" if name == INSTALLED else "are on disk"
        better = " or ".join(files[: _BEST.index(name)] if name in _BEST else files)
        return name, (
            f"its weights {origin}. A larger network finds more defects (see Networks in the "
            f"documentation's Getting started): put {better} into weights/ or the folder that "
            "ANOMALY_WEIGHTS names, and start again with --overwrite"
        )
    return best, "the network of the papers"


def weights(name: str) -> tuple[dict[str, Tensor], str]:
    """A network's official weights by name, and the sha256 of their file.

    Raises:
        WeightsError: there are none, or they are neither on disk nor can be downloaded.
    """
    official = official_weights(name)
    if official is None:
        raise WeightsError(
            f"torchvision publishes no weights for {name}; give a file: "
            "--set backbone.weights=/path/to/file.safetensors"
        )
    try:
        return official_state(official.url)
    except WeightsError as error:
        other = other_on_disk(name)
        if other is None:
            raise
        raise WeightsError(
            f"{error}. Or take a network whose weights are here, which works offline at once: "
            f"--set backbone.name={other}"
        ) from None


def _file_name(name: str) -> str:
    """What the file of a network's official weights is called."""
    return str(official_weights(name).url.rpartition("/")[2])  # type: ignore[union-attr]


def other_on_disk(name: str) -> str | None:
    """The best network but this one whose official weights are on disk; None if there is none."""
    for other in _BEST:
        if other != name:
            with suppress(WeightsError):
                official_file(official_weights(other).url, download=False)  # type: ignore[union-attr]
                return other
    return INSTALLED if name != INSTALLED and timm_networks.packaged_file(INSTALLED) else None
