"""Name -> network of torchvision or timm without weights, its normalisation and default layers."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, nn

from anomaly.errors import ConfigError, WeightsError, nearest
from anomaly.features import timm_networks
from anomaly.features.timm_networks import INSTALLED, is_timm
from anomaly.features.weights import official_file

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


@dataclass(frozen=True)
class Normalisation:
    """What is subtracted from and divided out of RGB in [0, 1], per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise images (B, 3, H, W)."""
        mean = torch.tensor(self.mean, device=images.device).view(3, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(3, 1, 1)
        return (images - mean) / std


def known_backbones() -> list[str]:
    """The names of torchvision that `build` takes; timm's begin with `timm/`."""
    return sorted([*torchvision.models.list_models(module=torchvision.models), "resnet50_v1"])


def build(name: str) -> nn.Module:
    """A network without weights: its tensors lie on the meta device and take no memory.

    Raises:
        ConfigError: no such network.
    """
    if is_timm(name):
        with torch.device("meta"):
            return timm_networks.build(name)
    if name not in known_backbones():
        raise ConfigError(
            f"backbone.name {name!r} isn't a network; {nearest(name, known_backbones())}"
        )
    # They carry heads for training, and would normalise their input again, see `normalisation`.
    extra: dict[str, Any] = {}
    if name in _FROM_TENSORFLOW:
        extra = {"aux_logits": True, "transform_input": False, "init_weights": False}
    try:
        with torch.device("meta"):
            network = torchvision.models.get_model(torchvision_name(name), weights=None, **extra)
    except NotImplementedError:  # RegNet computes its widths with tensors
        network = torchvision.models.get_model(torchvision_name(name), weights=None).to("meta")
    if name == "resnet50_v1":
        _stride_in_first_convolution(network)
    network.eval()
    return cast(nn.Module, network)


def torchvision_name(name: str) -> str:
    """What torchvision calls a network; of `resnet50_v1` it knows the newer form."""
    return "resnet50" if name == "resnet50_v1" else name


def _stride_in_first_convolution(network: nn.Module) -> None:
    """He et al.'s original bottleneck: the stride sits on the first 1×1, not on the 3×3."""
    for stage in ("layer2", "layer3", "layer4"):
        block = network.get_submodule(f"{stage}.0")
        first, second = block.get_submodule("conv1"), block.get_submodule("conv2")
        assert isinstance(first, nn.Conv2d)
        assert isinstance(second, nn.Conv2d)
        first.stride, second.stride = second.stride, first.stride


def default_layers(name: str, network: nn.Module, count: int) -> tuple[str, ...]:
    """The layers to hook when the config names none: those at strides 4, 8 and 16.

    Of a transformer whose blocks have one stride they are the blocks after half, three quarters
    and all of it.

    Args:
        name: of the network.
        network: of a family that has defaults.
        count: how many of the three, the coarsest first.

    Raises:
        ConfigError: the family has no defaults; the message says how to choose some.
    """
    stages = _stages(name, network)
    if stages is None:
        raise ConfigError(
            f"{name} has no default layers, since none are known to lie at strides 4, 8 and 16; "
            f"choose two or three of `anomaly layers --backbone {name}` and name them: "
            "--set 'backbone.layers=[first, second]'"
        )
    return stages[-count:]


def _stages(name: str, network: nn.Module) -> tuple[str, ...] | None:
    if is_timm(name):
        return timm_networks.stages(network) or None
    if type(network).__name__ == "VGG":
        pools = [
            i
            for i, layer in enumerate(network.get_submodule("features").children())
            if isinstance(layer, nn.MaxPool2d)
        ]
        third, fourth, fifth = (f"features.{i - 1}" for i in pools[2:5])
        return third, fourth, fifth
    return _STAGES.get(name) or _STAGES.get(type(network).__name__)


def normalisation(name: str) -> Normalisation:
    """The normalisation that the network's official weights were trained with."""
    if is_timm(name):
        said = timm_networks.settings(name)
        return Normalisation(tuple(said["mean"]), tuple(said["std"]))
    if name in _FROM_TENSORFLOW:
        return Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    weights = official_weights(name)
    if weights is None:
        return Normalisation(IMAGENET_MEAN, IMAGENET_STD)
    preset = weights.transforms()
    return Normalisation(tuple(preset.mean), tuple(preset.std))


def licence(name: str) -> str | None:
    """The licence of a network's official weights, where it is known: timm says it of its own."""
    return timm_networks.settings(name).get("license") if is_timm(name) else None


# For anomalies, the best first; the first is that of the papers.
_BEST = ("wide_resnet50_2", "resnet50")


def official_weights(name: str) -> Any | None:
    """Torchvision's enum member for `imagenet`: the first release, the one the papers used.

    None for a network that torchvision publishes no weights for.
    """
    if name == "resnet50_v1" or is_timm(name):
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
