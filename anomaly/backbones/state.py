"""Weights of a network by its name, checked and put into it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from anomaly.backbones.registry import backbone_of, build
from anomaly.backbones.weights import file_state
from anomaly.errors import ConfigError, WeightsError, some

log = logging.getLogger(__name__)


def read_weights(name: str, weights: str, seed: int) -> tuple[dict[str, Tensor], str | None]:
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
        return _random_state(name, seed), None
    state, sha256 = backbone.official() if weights == "imagenet" else file_state(Path(weights))
    return backbone.renamed(state, build(name)), sha256


def full_network(name: str, weights: str) -> nn.Module:
    """A network with all of its weights, nothing cut away; `random` ones are of seed 0."""
    network = build(name)
    state, _ = read_weights(name, weights, seed=0)
    load_state(network, state, build(name), f"the weights file for {name}")
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
    missing = [k for k in wanted if k not in state and not k.endswith("num_batches_tracked")]
    foreign = [k for k in state if k not in whole]
    shapes = [
        f"{k} is {tuple(state[k].shape)} instead of {tuple(v.shape)}"
        for k, v in wanted.items()
        if k in state and state[k].shape != v.shape
    ]
    order = [key for key in wanted if not key.endswith("num_batches_tracked")]
    held = order[: len(order) - len(missing)]
    if missing and held and missing == order[len(held) :] and not (foreign or shapes):
        raise WeightsError(
            f"{where} holds a part of {type(full).__name__}, up to {held[-1]}, and {len(missing)} "
            f"tensors behind that are missing, {missing[0]} for one. Choose layers that it has "
            "(backbone.layers), or give a whole file"
        )
    if missing or foreign or shapes:
        problems = [f"without {some(missing)}"] if missing else []
        problems += [f"with unknown {some(foreign)}"] if foreign else []
        problems += shapes[:3]
        raise WeightsError(
            f"{where} belongs to another network than {type(full).__name__}: "
            f"{'; '.join(problems)}. Check backbone.name against the file"
        )
    for key in wanted:
        if key in state and not _is_usable(key, state[key]):
            raise WeightsError(
                f"{where}: {key} holds NaN, infinite or impossible values; get the file again"
            )
    filled = {
        k: state[k].to(v.dtype).contiguous() if k in state else torch.zeros((), dtype=v.dtype)
        for k, v in wanted.items()
    }
    # Some networks (MNASNet) ask which version of their keys this is.
    versioned = OrderedDict(filled)
    versioned._metadata = wanted._metadata  # type: ignore[attr-defined]
    network.load_state_dict(versioned, assign=True)
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
    if values.is_sparse or values.is_meta:
        return False
    if not values.is_floating_point():
        return not values.is_complex()  # counters, and indices of windows
    if not values.numel():
        return True
    low, high = values.float().aminmax()  # formats of 8 bits have none of their own
    # A variance below 0 makes NaN of every image.
    return bool(low.isfinite() and high.isfinite()) and not (
        key.endswith("running_var") and low < 0
    )


def _random_state(name: str, seed: int) -> dict[str, Tensor]:
    """Seeded random weights. Warns: a network that was never trained sees nothing."""
    log.warning(
        "backbone.weights is 'random': %s has never seen an image, scores mean NOTHING. "
        "Use this to try out speed and plumbing only.",
        name,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return dict(backbone_of(name).network().state_dict())
