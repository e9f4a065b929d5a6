"""Network input -> feature maps -> patch embeddings, through forward hooks; and their precision.

`truncate` cuts a network behind the last of the wanted layers: what it doesn't need isn't there.
What runs is a copy with fewer passes over memory: batch norms folded, activations fused.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

from anomaly.backbones.layers import PROBES, Layout, layout_of, probes, takes
from anomaly.backbones.networks import Normalisation
from anomaly.errors import LayerError
from anomaly.hooks import HookSet, capture, match
from anomaly.hooks.capture import private
from anomaly.imaging.loading import NetworkInput
from anomaly.runtime import has_bf16, locked_cached_property

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class FeatureExtractor:
    """The part of a network up to the last wanted layer, read through forward hooks.

    `truncate` makes one without weights; `load_state` fills its network, and `to` puts it where it
    is going to compute. Threads may share one.

    Attributes:
        network: truncated, in eval mode. What runs is a copy with its batch norms folded and, on
            the CPU, its activations fused.
        layers: canonical paths, in the order in which they run.
        layouts: how each layer's output lies.
        copies: whether a later layer overwrites a wanted one in place.
        pairs: convolutions and batch norms to fold, see `folded`.
        precision: `fp32` or `bf16`, the number format that the network runs in.
    """

    engine: ClassVar[str] = "torch"  # what computes

    network: nn.Module
    layers: tuple[str, ...]
    layouts: tuple[Layout, ...]
    copies: bool
    pairs: tuple[Pair, ...]
    precision: str = "fp32"

    @property
    def channels(self) -> tuple[int, ...]:
        """C of each layer."""
        return tuple(layout.channels for layout in self.layouts)

    @property
    def strides(self) -> tuple[int, ...]:
        """Network pixels between neighbouring positions, of each layer."""
        return tuple(layout.stride for layout in self.layouts)

    @property
    def patch(self) -> int | None:
        """The side of the patches that a transformer cuts images into; None for other networks."""
        return next((each.stride for each in self.layouts if each.axes == "tokens"), None)

    def to(self, device: torch.device | str, precision: str) -> FeatureExtractor:
        """The same extractor in a number format, on a device to which its network is moved."""
        network = self.network.to(device).requires_grad_(False)
        return replace(self, network=network, precision=precision)

    @locked_cached_property
    def _network_that_runs(self) -> nn.Module:
        copy = folded(self.network, self.pairs, DTYPES[self.precision])
        return private(fused(copy, self.layers))

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Run the network as far as needed.

        Args:
            images: (B, 3, H, W), normalised.

        Returns:
            A map (B, C, h, w) for each layer, in the order of `layers`, in the extractor's number
            format.

        Raises:
            LayerError: the network doesn't take such images.
        """
        network = self._network_that_runs
        images = images.to(DTYPES[self.precision], memory_format=torch.channels_last)
        try:
            with (
                torch.inference_mode(),
                capture(network, self.layers, stop=True, clone=self.copies) as captured,
            ):
                captured.run(images)
                return self.maps_of(captured.pop(), images)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError, ValueError, AttributeError) as error:
            height, width = images.shape[2:]
            raise LayerError(
                f"{type(self.network).__name__} can't compute an image of {width}×{height} "
                f"({str(error).partition(chr(10))[0] or 'it fails'}); choose another size or "
                "network, or train the model again"
            ) from error

    def maps_of(self, outputs: Mapping[str, Tensor], images: Tensor) -> list[Tensor]:
        """Feature maps (B, C, h, w) of the layers, in their order.

        Args:
            outputs: what the layers put out, by path.
            images: (B, 3, H, W), what the network was shown.
        """
        return [
            layout.map_of(outputs[layer], images.shape[2:])
            for layer, layout in zip(self.layers, self.layouts, strict=True)
        ]


# Images that a CPU computes together. Eight take a tenth more memory, and in float32 more time.
_CPU_BATCH = 4


@dataclass(frozen=True, eq=False)
class Embedder:
    """The stages between a rendered image and its patch embeddings.

    Attributes:
        extractor: the truncated backbone.
        normalise: what it expects of its input.
        align: feature maps (B, C_i, h_i, w_i) of its layers -> embeddings (B, h, w, D) float32.
        device: where it is.
    """

    extractor: FeatureExtractor
    normalise: Normalisation
    align: Callable[[Sequence[Tensor]], Tensor]
    device: torch.device

    def maps(self, batch: Sequence[NetworkInput]) -> list[Tensor]:
        """Feature maps (B, C_i, h_i, w_i) of images of one size, in the extractor's precision."""
        return self.extractor(network_input(batch, self.normalise, self.device))

    def __call__(self, batch: Sequence[NetworkInput]) -> Tensor:
        """Patch embeddings (B, h, w, D) of images of one size."""
        with torch.inference_mode():
            return self.align(self.maps(batch))

    def max_batch_size(self, wanted: int) -> int:
        """How many images to compute together, at most as many as are wanted."""
        return min(wanted, _CPU_BATCH) if self.device.type == "cpu" else wanted

    def inference_mode(self) -> AbstractContextManager[Any]:
        """A `torch.inference_mode` context, in which nothing is recorded for gradients."""
        return torch.inference_mode()

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(h, w) of the patches of a network input of (H, W) pixels, by a dry run."""
        with torch.inference_mode():
            black = torch.zeros(1, 3, *size, device=self.device)
            height, width = self.align(self.extractor(black)).shape[1:3]
        return height, width


def network_input(
    batch: Sequence[NetworkInput], normalise: Normalisation, device: torch.device
) -> Tensor:
    """Normalised images (B, 3, H, W) float32 of one size, on a device.

    Args:
        batch: rendered images of one size.
        normalise: what the backbone expects.
        device: where the backbone is.
    """
    pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
    if device.type == "cuda":  # from pinned memory the copy doesn't hold up this thread
        pixels = pixels.pin_memory().to(device, non_blocking=True)
    # (B, H, W, 3) is what torch calls channels_last.
    return normalise(pixels.permute(0, 3, 1, 2))


# The standard deviation that rounding may add, as a share of the maps' own: a hundredth of their
# variance. ResNet-50 stays at 0.03 to 0.08. What that does to scores: docs/reproducibility.md.
LIMIT = 0.1


def choose_precision(extractor: FeatureExtractor, images: Tensor) -> str:
    """bf16 where the device has it and a trial shows that it is safe, else fp32.

    Args:
        extractor: with its weights, on its device.
        images: (B, 3, H, W), a few normalised training images, on the same device.

    Returns:
        `fp32` or `bf16`.
    """
    device = images.device
    if not has_bf16(device):
        log.debug("fp32: %s has no bf16", device)
        return "fp32"
    share = rounding_share(extractor, images)
    if max(share) <= LIMIT:
        log.debug("bf16: rounding is %.1f %% of the feature maps' variation", 100 * max(share))
        return "bf16"
    log.warning(
        "bf16 would blur this network's feature maps (rounding is %.0f %% of their variation): "
        "computing in fp32",
        100 * max(share),
    )
    return "fp32"


def rounding_share(extractor: FeatureExtractor, images: Tensor) -> Sequence[float]:
    """How much bf16 changes each layer's maps, as a share of how much they vary.

    Returns:
        For each layer the root mean square of the change over the standard deviation between
        positions and images, means over channels; infinite where bf16 overflows.
    """
    exact = extractor.to(images.device, "fp32")(images)
    rounded = extractor.to(images.device, "bf16")(images)
    shares = []
    for a, b in zip(exact, rounded, strict=True):
        change = (b.float() - a).square().mean()
        variation = a.var(dim=(0, 2, 3)).mean()
        share = float((change / variation).sqrt())
        shares.append(share if share == share else float("inf"))  # NaN: it overflows
    return shares


Pair = tuple[str, str]


def folded(network: nn.Module, pairs: Sequence[Pair], dtype: torch.dtype) -> nn.Module:
    """A copy for inference: batch norms folded, in the memory format that convolutions like best.

    Measured on ResNet-50 at 256 px (two cores): folding takes a fifth off float32 and a third off
    bfloat16. Modules keep their paths, so layers are hooked as before.

    Args:
        network: in eval mode, with its weights.
        pairs: of a convolution and a batch norm, see `DryRun`.
        dtype: of weights and activations.
    """
    network = copy.deepcopy(network)
    for conv, norm in pairs:
        convolution, batch_norm = network.get_submodule(conv), network.get_submodule(norm)
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(batch_norm, nn.BatchNorm2d)
        joined = fuse_conv_bn_eval(convolution, batch_norm)
        activation = dict(batch_norm.named_children())  # none, but for one that is timm's
        if activation:  # in a sequence behind its convolution, `fused` finds it
            network.set_submodule(conv, nn.Identity())
            sequence = OrderedDict(convolution=joined, **activation)
            network.set_submodule(norm, nn.Sequential(sequence))
        else:
            network.set_submodule(conv, joined)
            network.set_submodule(norm, nn.Identity())
    network.requires_grad_(False)
    return network.to(dtype).to(memory_format=torch.channels_last)


# Between a convolution and its activation the whole feature map goes to memory and back. oneDNN,
# which computes torch's convolutions on the CPU, applies both before it writes.
# By type: oneDNN's name, and its arguments.
_ACTIVATIONS: dict[type[nn.Module], tuple[str, list[float]]] = {
    nn.ReLU: ("relu", []),
    nn.ReLU6: ("hardtanh", [0.0, 6.0]),
}


def fused(network: nn.Module, layers: Sequence[str]) -> nn.Module:
    """Let convolutions apply the activations behind them in an `nn.Sequential` as they write.

    Measured at 256 px: 14 % off MobileNetV2 and EfficientNet-Lite2 in float32, 20 to 27 % in
    bfloat16.

    Args:
        network: for inference only, its batch norms folded; changed in place. What runs afterwards
            has no gradients.
        layers: paths that are hooked. What they put out stays what it is.

    Returns:
        The network, as it was where it isn't on the CPU, where torch was built without oneDNN, or
        where the processor lacks what oneDNN computes bf16 with.
    """
    parameters = list(network.parameters())
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    if not on_cpu or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return network
    rounded = any(p.dtype == torch.bfloat16 for p in parameters)
    if rounded and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return network  # torch has other convolutions there, oneDNN has none
    for path, module in list(network.named_modules()):
        if type(module).forward is nn.Sequential.forward:
            _fuse_sequence(module, f"{path}." if path else "", layers)
    return network


class _Convolution(nn.Module):
    """A convolution and its activation, (B, C, H, W) -> (B, C', H', W')."""

    def __init__(self, convolution: nn.Conv2d, activation: type[nn.Module]) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        self._geometry = (
            convolution.padding,
            convolution.stride,
            convolution.dilation,
            convolution.groups,
        )
        self._activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        name, values = self._activation
        run = torch.ops.mkldnn._convolution_pointwise
        result: Tensor = run(x, self.weight, self.bias, *self._geometry, name, values, "")
        return result


def _fuse_sequence(sequence: nn.Module, inside: str, layers: Sequence[str]) -> None:
    """Join each convolution with the activation behind it; batch norms between them are gone.

    Args:
        sequence: whose children run one after the other; changed in place.
        inside: how the children's paths begin.
        layers: paths whose outputs somebody reads.
    """
    children = dict(sequence.named_children())
    kept = [
        name
        for name, child in children.items()
        if inside + name in layers or type(child) is not nn.Identity
    ]
    for name, after in pairwise(kept):
        convolution, activation = children[name], type(children[after])
        if (
            type(convolution) is nn.Conv2d
            and convolution.padding_mode == "zeros"  # as oneDNN pads
            and isinstance(convolution.padding, tuple)
            and activation in _ACTIVATIONS
            and inside + name not in layers
        ):
            sequence.register_module(name, _Convolution(convolution, activation))
            sequence.register_module(after, nn.Identity())


class PassThrough(nn.Module):
    """Stands where a part was that isn't needed: gives back its first argument."""

    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        """Whatever else the part was called with."""
        return first


def truncate(network: nn.Module, layers: Sequence[str]) -> FeatureExtractor:
    """Drop every part of a network that isn't needed to compute `layers`, in place.

    A dry run on the meta device, which computes nothing, shows which parameters are touched before
    the last wanted layer has run; modules none of whose parameters are touched are replaced.

    Args:
        network: on the meta device.
        layers: paths or patterns, as `anomaly.hooks.match` takes them.

    Returns:
        The extractor, still without weights.

    Raises:
        LayerError: a layer doesn't exist, doesn't run exactly once, or gives neither a map nor
            tokens; or it gives something else than a map (B, C, h, w), of a network that takes
            squares only.
    """
    with torch.device("meta"):
        run = truncate_in_place(network, layers)
        side, paths = run.side, tuple(run.outputs)
        layouts = []
        for path, output in run.outputs.items():
            layout = layout_of(output.shape, (side, side))
            if layout is None:
                raise LayerError(
                    f"layer {path!r} gives {tuple(output.shape)}, not a feature map (B, C, h, w), "
                    "nor a token for each patch; choose another layer"
                )
            layouts.append(layout)
        only_maps = all(layout.axes == "map" for layout in layouts)
        if not only_maps and not takes(network, side, 2 * side, paths):
            raise LayerError(
                f"{type(network).__name__} takes images of {side}×{side} only, so its tokens "
                "can't be placed on others; choose another network"
            )
        return FeatureExtractor(network.eval(), paths, tuple(layouts), run.copies, run.pairs)


def describe(extractor: FeatureExtractor) -> dict[str, Any]:
    """The findings of `truncate`'s dry runs as plain values, from which `truncate_again` starts."""
    modules = extractor.network.named_modules()
    return {
        "layers": list(extractor.layers),
        "channels": list(extractor.channels),
        "strides": list(extractor.strides),
        "axes": [layout.axes for layout in extractor.layouts],
        "dropped": [path for path, module in modules if isinstance(module, PassThrough)],
        "copies": extractor.copies,
        "folded": [list(pair) for pair in extractor.pairs],
    }


def truncate_again(network: nn.Module, described: Mapping[str, Any]) -> FeatureExtractor:
    """Truncate a network in place as before, without dry runs, which import torch's compiler (2 s).

    Args:
        network: on the meta device.
        described: what `describe` gave.
    """
    for path in described["dropped"]:
        network.set_submodule(path, PassThrough(), strict=True)
    layouts = zip(described["axes"], described["channels"], described["strides"], strict=True)
    return FeatureExtractor(
        network.eval(),
        tuple(described["layers"]),
        tuple(Layout(*values) for values in layouts),
        described["copies"],
        tuple((convolution, norm) for convolution, norm in described["folded"]),
    )


def truncate_in_place(network: nn.Module, layers: Sequence[str], side: int | None = None) -> DryRun:
    """Drop every part of a network that isn't needed to compute `layers`, in place.

    Args:
        network: on the meta device.
        layers: paths in any form that `anomaly.hooks.resolve` takes.
        side: of the square dry-run image; by default the first of `probes` that it takes.

    Raises:
        LayerError: a layer doesn't exist, never runs, runs several times, so that its path doesn't
            say which output is meant, or puts out several tensors; or the network doesn't take
            images of this size.
    """
    paths = list(dict.fromkeys(path for layer in layers for path in match(network, layer)))
    sides = (each for each in probes(network) if takes(network, each, each, paths))
    run = DryRun(network, paths, side or next(sides, PROBES[0]))
    _drop_unused(network, set(run.reads), keep=paths)
    return run


# By name, for timm isn't imported without need. Its `Conv2dSame` pads as TensorFlow does, its
# `BatchNormAct2d` is a batch norm that applies an activation itself.
_CONVOLUTIONS = ("Conv2d", "Conv2dSame")
_NORMS = ("BatchNorm2d", "BatchNormAct2d")


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A pass of a network of one black image on the meta device, watched up to the last layer.

    It sees operations, also those that no module call would show, so that it doesn't matter how
    the network names or nests its modules.

    Args:
        network: on the meta device.
        paths: of the wanted layers.
        side: of the square image.

    Attributes:
        side: as given.
        outputs: by path, in the order in which the layers run.
        reads: how many operations read each tensor, by its id; parameters are among them.
        copies: whether a later layer overwrites a wanted output in place.

    Raises:
        LayerError: as `truncate_in_place`.
    """

    def __init__(self, network: nn.Module, paths: Sequence[str], side: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.side = side
        self.outputs: dict[str, Tensor] = {}
        self.reads: Counter[int] = Counter()
        self.copies = False
        self._waiting = set(paths)
        self._wanted = frozenset(paths)
        self._names = {module: path for path, module in network.named_modules()}
        self._calls: Counter[str] = Counter()
        self._versions: dict[str, int] = {}
        self._made: dict[int, str] = {}  # convolutions by what they put out
        self._joined: list[tuple[int, str]] = []  # what goes into a batch norm, and its path
        self._alive: list[Any] = []  # so that no two tensors of the run share an id
        self._run(network, type(network).__name__)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._waiting:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._alive += tensors
            self.reads.update(map(id, tensors))
        return func(*args, **(kwargs or {}))

    def _run(self, network: nn.Module, name: str) -> None:
        image = torch.empty(1, 3, self.side, self.side, device="meta")
        try:
            with torch.no_grad(), torch.device("meta"), self, HookSet(network) as hooks:
                hooks.forward(nn.Module, self._note)
                network(image)
        except Exception as error:  # of any kind; behind the last wanted layer none matters
            if self._waiting:
                raise LayerError(
                    f"{name} doesn't take images of {self.side}×{self.side}; choose another "
                    "network or size"
                ) from error
        for path in sorted(self._wanted):
            if not self._calls[path]:
                raise LayerError(f"layer {path!r} of {name} never runs; choose another")
            if self._calls[path] > 1:
                raise LayerError(
                    f"layer {path!r} of {name} runs {self._calls[path]} times in one pass, so its "
                    "output is ambiguous; choose another layer"
                )
            if path not in self.outputs:
                raise LayerError(f"layer {path!r} gives several tensors; choose another layer")

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        path, kind = self._names[module], type(module).__name__
        self._calls[path] += 1
        if not self._waiting:
            return
        self._alive.extend((inputs, output))
        if isinstance(module, nn.Conv2d) and kind in _CONVOLUTIONS:
            self._made[id(output)] = path
        elif kind in _NORMS and getattr(module, "running_mean", None) is not None:
            self._joined.append((id(inputs[0]), path))
        if path in self._waiting and isinstance(output, Tensor):
            self.outputs[path], self._versions[path] = output, output._version
        self._waiting.discard(path)
        if not self._waiting:
            kept = self.outputs.items()
            self.copies = any(values._version != self._versions[key] for key, values in kept)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The convolutions whose output goes into a batch norm and nowhere else, with that."""
        wanted = {id(output) for output in self.outputs.values()}
        return tuple(
            (self._made[entering], norm)
            for entering, norm in self._joined
            if entering in self._made.keys() - wanted
            and self._calls[self._made[entering]] == self._calls[norm] == 1
            and self.reads[entering] == 1
        )


def _drop_unused(module: nn.Module, used: set[int], keep: Sequence[str], path: str = "") -> None:
    for name, child in list(module.named_children()):
        inner = f"{path}.{name}" if path else name
        tensors = [*child.parameters(), *child.buffers()]
        wanted = any(p == inner or p.startswith(inner + ".") for p in keep)
        unused = tensors and not wanted and not any(id(t) in used for t in tensors)
        # A list or a dict of modules has no pass of its own: somebody goes through its members.
        if unused and type(child).forward is not nn.Module.forward:
            module.register_module(name, PassThrough())
        else:
            _drop_unused(child, used, keep, inner)
