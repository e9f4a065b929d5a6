"""The registry of networks: torchvision's, timm's, and those of your own, each by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from anomaly.backbones import timm_networks, torchvision_networks
from anomaly.errors import ConfigError, WeightsError

State: TypeAlias = dict[str, Tensor]


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


def _of_imagenet() -> Normalisation:
    return Normalisation(torchvision_networks.IMAGENET_MEAN, torchvision_networks.IMAGENET_STD)


def _no_official() -> tuple[State, str]:
    raise WeightsError(
        "this network has no official weights; give a file: "
        "--set backbone.weights=/path/to/file.safetensors"
    )


@dataclass(frozen=True)
class Backbone:
    """A network, and what has to be known about it.

    Attributes:
        network: makes it with random weights, which come from torch's global generator. It takes
            normalised images (B, 3, H, W).
        stages: the layers of a network at strides 4, 8 and 16, which are hooked where a config
            names none; empty where none are known.
        normalisation: what its weights were trained with.
        official: reads what `backbone.weights: imagenet` means: tensors by name, and the sha256 of
            their file.
        renamed: the tensors of a file by the network's own key names.
        licence: of the official weights, where it is known.
        packages: distributions whose versions a model's manifest records, besides torchvision's.
    """

    network: Callable[[], nn.Module]
    stages: Callable[[nn.Module], Sequence[str]] = lambda network: ()
    normalisation: Callable[[], Normalisation] = _of_imagenet
    official: Callable[[], tuple[State, str]] = _no_official
    renamed: Callable[[State, nn.Module], State] = lambda state, network: state
    licence: Callable[[], str | None] = lambda: None
    packages: tuple[str, ...] = ()


# Networks of your own. A line is enough:
#     BACKBONES["mine"] = Backbone(MyNetwork, lambda network: ("layer1", "layer2", "layer3"))
# For commands, a package names its `Backbone` as an entry point of the group `anomaly.backbones`.
BACKBONES: dict[str, Backbone] = {}
_ENTRY_POINTS = "anomaly.backbones"


def backbone_of(name: str) -> Backbone:
    """What the registry holds under a name; torchvision's networks have their own names there.

    Raises:
        ConfigError: no such network; for those of torchvision and timm, when it is made.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    if name.startswith(timm_networks.PREFIX):
        return _of_timm(name)
    if name not in torchvision_networks.known_backbones() and (own := _of_packages(name)):
        return own
    return Backbone(
        network=partial(torchvision_networks.make, name),
        stages=partial(torchvision_networks.stages, name),
        normalisation=lambda: Normalisation(*torchvision_networks.mean_and_std(name)),
        official=partial(torchvision_networks.weights, name),
    )


@cache
def _of_packages(name: str) -> Backbone | None:
    for entry in entry_points(group=_ENTRY_POINTS, name=name):
        return cast(Backbone, entry.load())
    return None


def _of_timm(name: str) -> Backbone:
    def normalisation() -> Normalisation:
        settings = timm_networks.settings(name)
        return Normalisation(tuple(settings["mean"]), tuple(settings["std"]))

    return Backbone(
        network=partial(timm_networks.build, name),
        stages=timm_networks.stages,
        normalisation=normalisation,
        official=partial(timm_networks.official_state, name),
        renamed=timm_networks.renamed,
        licence=lambda: timm_networks.settings(name).get("license"),
        packages=("timm",),
    )


def build(name: str) -> nn.Module:
    """A network without weights: its tensors lie on the meta device and take no memory.

    Raises:
        ConfigError: no such network.
    """
    make = backbone_of(name).network
    try:
        with torch.device("meta"):
            network = make()
    except NotImplementedError:  # RegNet computes its widths with tensors
        network = make().to("meta")
    return network.eval()


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
    stages = tuple(backbone_of(name).stages(network))
    if not stages:
        raise ConfigError(
            f"{name} has no default layers, since none are known to lie at strides 4, 8 and 16; "
            f"choose two or three of `anomaly layers --backbone {name}` and name them: "
            "--set 'backbone.layers=[first, second]'"
        )
    return stages[-count:]


def normalisation(name: str) -> Normalisation:
    """The normalisation that the network's official weights were trained with."""
    return backbone_of(name).normalisation()
