"""Networks by name: torchvision's, timm's and your own; how they are made and given weights."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anomaly.backbones import networks
from anomaly.backbones.weights import State, read_state, weights_path
from anomaly.errors import ConfigError, WeightsError, some

log = logging.getLogger(__name__)


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


def _no_official() -> tuple[State, str]:
    raise WeightsError(
        "this network has no official weights; give a file: "
        "--set backbone.weights=/path/to/file.safetensors"
    )


@dataclass(frozen=True)
class Backbone:
    """A network, and what has to be known about it.

    All but `network` are called when they are needed: some import a library or read a table.

    Attributes:
        network: makes it with random weights, which come from torch's global generator. It takes
            normalised images (B, 3, H, W).
        normalisation: what its weights were trained with.
        official: reads what `backbone.weights: imagenet` means: tensors by name, and the sha256 of
            their file.
        renamed: the tensors of a file by the network's own key names.
        licence: of the official weights, where it is known.
        classes: names of the classes that the official weights tell apart, where they are known.
        packages: distributions whose versions a model's manifest records, besides torchvision's.
    """

    network: Callable[[], nn.Module]
    normalisation: Callable[[], Normalisation] = lambda: Normalisation(
        networks.IMAGENET_MEAN, networks.IMAGENET_STD
    )
    official: Callable[[], tuple[State, str]] = _no_official
    renamed: Callable[[State, nn.Module], State] = lambda state, network: state
    licence: Callable[[], str | None] = lambda: None
    classes: Callable[[], Sequence[str]] = lambda: ()
    packages: tuple[str, ...] = ()


# Networks of your own. A line is enough:
#     BACKBONES["mine"] = Backbone(MyNetwork)
# For commands, a package names its `Backbone` as an entry point of the group `anomaly.backbones`.
BACKBONES: dict[str, Backbone] = {}


def backbone_of(name: str) -> Backbone:
    """What the registry holds under a name; torchvision's networks have their own names there.

    Raises:
        ConfigError: no such network; for those of torchvision and timm, when it is made.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    if name.startswith(networks.TIMM):
        return _of_timm(name)
    if name not in networks.torchvision_names() and (own := _of_package(name)):
        return own
    return _of_torchvision(name)


@cache
def _of_package(name: str) -> Backbone | None:
    for entry in entry_points(group="anomaly.backbones", name=name):
        return cast(Backbone, entry.load())
    return None


def version_of(package: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _of_torchvision(name: str) -> Backbone:
    def classes() -> Sequence[str]:
        weights = networks.torchvision_weights(name)
        return weights.meta["categories"] if weights else ()

    return Backbone(
        network=partial(networks.torchvision_network, name),
        normalisation=lambda: Normalisation(*networks.torchvision_mean_and_std(name)),
        official=partial(networks.torchvision_state, name),
        classes=classes,
    )


def _of_timm(name: str) -> Backbone:
    def normalisation() -> Normalisation:
        settings = networks.timm_settings(name)
        return Normalisation(tuple(settings["mean"]), tuple(settings["std"]))

    return Backbone(
        network=partial(networks.timm_network, name),
        normalisation=normalisation,
        official=partial(networks.timm_state, name),
        renamed=networks.timm_keys,
        licence=lambda: networks.timm_settings(name).get("license"),
        packages=("timm",),
    )


def build(name: str) -> nn.Module:
    """A network without weights: its tensors lie on the meta device and take no memory.

    Raises:
        ConfigError: no such network.
    """
    make = backbone_of(name).network
    try:
        with torch.device("meta"), _NoInitialValues():
            network = make()
    except NotImplementedError:  # RegNet computes its widths with tensors
        network = make().to("meta")
    return network.eval()


class _NoInitialValues(TorchFunctionMode):
    """Leaves tensors on the meta device unfilled: torch imports its compiler to fill them, 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILL:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_FILL = (
    *(nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_),
    *(Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_),  # truncated normal distributions
)


def normalisation(name: str) -> Normalisation:
    """The normalisation that the network's official weights were trained with."""
    return backbone_of(name).normalisation()


def read_weights(name: str, weights: str, seed: int) -> tuple[State, str | None]:
    """A network's tensors by name, and the sha256 of the file that they came from.

    Args:
        name: the network.
        weights: `imagenet` for the official ones, `random`, or the path of a `.safetensors` or
            `.pth` file. Official ones of timm are those of an installed package, else those in the
            user's Hugging Face cache.
        seed: for random weights, which have no file.

    Raises:
        WeightsError: see `anomaly.backbones.weights`.
    """
    backbone = backbone_of(name)
    if weights == "random":
        log.warning(
            "backbone.weights is 'random': %s is untrained, so its scores mean NOTHING. Use it "
            "only to test speed and installation.",
            name,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return dict(backbone.network().state_dict()), None
    if weights == "imagenet":
        state, sha256 = backbone.official()
    else:
        state, sha256 = read_state(weights_path(Path(weights)))
    return backbone.renamed(state, build(name)), sha256


def full_network(name: str, weights: str) -> nn.Module:
    """A network with all of its weights, nothing cut away; `random` ones are of seed 0."""
    network = build(name)
    state, _ = read_weights(name, weights, seed=0)
    load_state(network, state, network, f"the weights file for {name}")
    return network


def load_state(
    network: nn.Module, state: Mapping[str, Tensor], full: nn.Module, where: str
) -> None:
    """Give a truncated network its weights, in place.

    Args:
        network: what is left of `full` after truncation, on the meta device.
        state: tensors by torchvision's key names; those of dropped layers may be there or not.
            Half-precision values are widened to the network's own type.
        full: the whole network, which says which keys belong to it.
        where: the source of `state`, for error messages.

    Raises:
        WeightsError: keys are missing or foreign, shapes differ, or values can't be weights.
    """
    wanted, whole = network.state_dict(), full.state_dict()
    # Counters of training steps, which old files lack and inference doesn't read.
    needed = [key for key in wanted if not key.endswith("num_batches_tracked")]
    missing = [key for key in needed if key not in state]
    foreign = [key for key in state if key not in whole]
    shapes = [
        f"{k} is {tuple(state[k].shape)} instead of {tuple(v.shape)}"
        for k, v in wanted.items()
        if k in state and state[k].shape != v.shape
    ]
    if missing or foreign or shapes:
        problems = [f"without {some(missing)}"] if missing else []
        problems += [f"with unknown {some(foreign)}"] if foreign else []
        problems += shapes[:3]
        raise WeightsError(
            f"{where} belongs to another network than {type(full).__name__}, or holds a part of "
            f"it: {'; '.join(problems)}. Check backbone.name and backbone.layers against the file"
        )
    for key in wanted:
        if key in state and not _is_usable(key, state[key]):
            raise WeightsError(
                f"{where}: {key} holds NaN, infinite or impossible values; get the file again"
            )
    filled = OrderedDict(
        (k, state[k].to(v.dtype).contiguous() if k in state else torch.zeros((), dtype=v.dtype))
        for k, v in wanted.items()
    )
    # Some networks (MNASNet) ask which version of their keys this is.
    filled._metadata = wanted._metadata  # type: ignore[attr-defined]
    network.load_state_dict(filled, assign=True)
    _fill_buffers(network)


def _fill_buffers(network: nn.Module) -> None:
    """Compute what no weights file holds: positions, windows. In place, after the weights.

    Raises:
        ConfigError: a module doesn't say how.
    """
    for path, module in network.named_modules():
        empty = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
        if not empty:
            continue
        if not hasattr(module, "init_non_persistent_buffers"):
            raise ConfigError(
                f"{type(network).__name__}: the buffers of {path} can't be computed without its "
                "weights; choose another network"
            )
        for key, buffer in empty.items():
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
        module.init_non_persistent_buffers()


def _is_usable(key: str, values: Tensor) -> bool:
    plain = values.layout == torch.strided and not values.is_quantized
    if not plain or values.is_meta or values.is_complex():
        return False
    try:
        numbers = values.float()  # formats of 8 bits have no minimum of their own
    except RuntimeError:  # those of 4 bits and fewer can't be computed with
        return False
    if not values.is_floating_point():
        return True  # counters, and indices of windows
    if not values.numel():
        return True
    low, high = numbers.aminmax()
    # A variance below 0 makes NaN of every image.
    return bool(low.isfinite() and high.isfinite()) and not (
        key.endswith("running_var") and low < 0
    )
