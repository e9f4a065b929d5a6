"""A detector as a graph in a file: images -> patch embeddings, or on to patch scores."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.backbones.engine import ENGINES, installed
from anomaly.backbones.extractor import folded
from anomaly.backbones.networks import build, load_state
from anomaly.errors import ModelError
from anomaly.export.pixels import PixelsToVerdict
from anomaly.hooks import HookSet, capture
from anomaly.scoring.model import Model
from anomaly.storage.load import graph_names

_RESAMPLE = torch.ops.aten._upsample_bicubic2d_aa.vec


def resampled_by_products(traced: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A traced program in which antialiased bicubic resampling is replaced by equal operations.

    Transformers resample the positions of patches in that way. OpenVINO 2026.4 leaves out the
    antialiasing, which changes scores by a third for small grids.
    """
    if all(node.target is not _RESAMPLE for node in traced.graph.nodes):
        return traced
    without: torch.export.ExportedProgram = traced.run_decompositions(
        {_RESAMPLE: bicubic_antialiased}
    )
    return without


def bicubic_antialiased(
    maps: Tensor, size: list[int], align_corners: bool, scale_factors: Any = None
) -> Tensor:
    """`torch.nn.functional.interpolate(mode="bicubic", antialias=True)`.

    Args:
        maps: (B, C, H, W).
        size: (h, w) of the result.
        align_corners: ignored; positions of patches are resampled without it.
        scale_factors: ignored, since the size is given.

    Returns:
        (B, C, h, w).
    """
    rows, columns = (
        _weights(wanted, known, maps) for wanted, known in zip(size, maps.shape[2:], strict=True)
    )
    return rows @ maps @ columns.T


def _weights(wanted: int, known: int, like: Tensor) -> Tensor:
    """Weights (wanted, known) of known positions at each wanted one: Keys's cubic, a = -0.5."""
    places = torch.arange(wanted, device=like.device, dtype=like.dtype) + 0.5
    scale = known / torch.ones_like(places).sum()  # their number may be unknown while tracing
    own = torch.arange(known, device=like.device, dtype=like.dtype) + 0.5
    away = ((own - places[:, None] * scale) / scale.clamp(min=1)).abs()
    near = (1.5 * away - 2.5) * away * away + 1
    far = ((-0.5 * away + 2.5) * away - 4) * away + 2
    weights = torch.where(away < 1, near, torch.where(away < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)


OPSET = 18
_LARGEST = 1 << 16  # of batch, height and width in multiples; no limit in fact

_IMAGES = (
    "RGB in [0, 1], full scale of the file's depth is 1, resized as config.yaml says; the graph "
    "normalises"
)
_MEANINGS = {
    "embeddings": "patch embeddings",
    "patch_scores": "distance of each patch to good patches, higher is more anomalous",
    "nearest": "nearest vector of the memory bank, the row of `vectors` in scorer.safetensors",
}


class _Network(nn.Module):
    """Images (B, 3, H, W) in [0, 1] -> patch embeddings (B, h, w, D)."""

    mean: Tensor
    std: Tensor

    def __init__(self, detector: Model) -> None:
        super().__init__()
        normalise = detector.normalise
        self.network = _padded_alike(_to_the_end(detector), _example(detector)[0])
        self.register_buffer("mean", torch.tensor(normalise.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(normalise.std).view(3, 1, 1))
        self._layers, self._align = detector.extractor.layers, detector.scorer.align
        self._maps_of = detector.extractor.maps_of

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        # Without the early stop, which a trace can't follow: layers after the last hooked one
        # aren't used, so they aren't in the graph.
        with capture(self.network, self._layers) as captured:
            captured.run((images - self.mean) / self.std)
            maps = self._maps_of(captured.pop(), images)
        return (self._align(maps),)


def _to_the_end(detector: Model) -> nn.Module:
    """The detector's network, folded, so that it can run to its end.

    Layers after the last wanted one were replaced by layers that pass on their input. Within a
    block, its shape is often wrong for the rest of the block; then the whole network is used, with
    zeros for the weights that no wanted layer needs.

    Raises:
        ModelError: the whole network can't run to its end either.
    """
    extractor, name = detector.extractor, detector.config.backbone.name
    images, _ = _example(detector)
    kept = folded(extractor.network, extractor.pairs, torch.float32)
    if _runs(kept, images):
        return kept
    whole, state = build(name), extractor.network.state_dict()
    zeros = {
        key: torch.zeros(like.shape, dtype=like.dtype)
        for key, like in whole.state_dict().items()
        if key not in state
    }
    load_state(whole, state | zeros, build(name), name)
    whole = folded(whole.eval(), extractor.pairs, torch.float32)
    if not _runs(whole, images):
        height, width = images.shape[2:]
        raise ModelError(
            f"this network can't be written as a graph: {name} doesn't run to its end on images of "
            f"{height}×{width}; train with another backbone"
        )
    return whole


class _Padded(nn.Module):
    """A convolution that pads with a constant number of zeros."""

    def __init__(self, convolution: nn.Conv2d, sides: Sequence[int]) -> None:
        super().__init__()
        self.convolution, self.sides = convolution, list(sides)

    def forward(self, x: Tensor) -> Tensor:
        c = self.convolution
        x = nn.functional.pad(x, self.sides)
        return nn.functional.conv2d(x, c.weight, c.bias, c.stride, 0, c.dilation, c.groups)


def _padded_alike(network: nn.Module, images: Tensor) -> nn.Module:
    """Make a network's convolutions pad all images as they pad these; in place.

    timm's networks of TensorFlow compute the padding from their input's size, which takes a trace
    minutes. Since sides of images are multiples of the coarsest stride, it is the same for all
    sizes.
    """
    same = [n for n, m in network.named_modules() if type(m).__name__ == "Conv2dSame"]
    if not same:
        return network
    from timm.layers.padding import pad_same_arg

    with torch.inference_mode(), HookSet(network) as hooks:
        seen: dict[str, tuple[int, ...]] = {}
        for path in same:
            hooks.forward_pre(
                path, lambda _, inputs, path: seen.update({path: inputs[0].shape}), path
            )
        network(images)
    for path, shape in seen.items():
        c = network.get_submodule(path)
        assert isinstance(c, nn.Conv2d)
        sides = pad_same_arg(list(shape[2:]), list(c.kernel_size), list(c.stride), list(c.dilation))
        network.set_submodule(path, _Padded(c, sides))
    return network


def _runs(network: nn.Module, images: Tensor) -> bool:
    try:
        with torch.inference_mode():
            network(images)
    except Exception:  # of any kind, by what gets something else than it goes on with
        return False
    return True


class _Whole(nn.Module):
    """Images -> patch scores (B, h, w), and nearest bank vectors for PatchCore."""

    def __init__(self, detector: Model) -> None:
        super().__init__()
        self.embed, self.score = _Network(detector), detector.scorer.graph()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        scored: tuple[Tensor, ...] = self.score(*self.embed(images))
        return scored


# Meaning and lengths of the axes by name: first of the input, then of the outputs.
_Described = dict[str, tuple[str, list[int | str]]]


def _described(detector: Model, outputs: Sequence[Tensor], *, whole: bool) -> _Described:
    """The description of a graph from images, by the outputs for some of them."""
    sizing = detector.loading.sizing
    sides: Sequence[int | str] = ("height", "width")
    grid: Sequence[int | str] = ("h", "w")
    step = f"; height and width are multiples of {sizing.multiple}"
    if sizing.only is not None:
        sides, grid, step = sizing.only, outputs[0].shape[1:3], ""
    described: _Described = {"images": (_IMAGES + step, ["batch", 3, *sides])}
    names = ["patch_scores", "nearest"] if whole else ["embeddings"]
    for name, output in zip(names, outputs, strict=False):  # without a bank none is the nearest
        described[name] = (_MEANINGS[name], ["batch", *grid, *output.shape[3:]])
    return described


def write_graph(
    detector: Model,
    folder: Path,
    engine: str,
    *,
    whole: bool = False,
    camera: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Write a detector's graph, as `network` or `whole`.

    Args:
        detector: on the CPU, in fp32.
        folder: for the files, which depend on the engine.
        engine: a key of `anomaly.backbones.engine.ENGINES`.
        whole: whether the graph includes patch scores.
        camera: (H0, W0) of the raw RGB images that a whole graph takes and judges; None for network
            inputs and patch scores.

    Returns:
        Its file, inputs and outputs, as in export.json.

    Raises:
        ModelError: the network or the method can't be traced.
        DataError: the model doesn't take such images.
        OSError: no room.
    """
    example, free = _example(detector)
    if camera is None:
        module: nn.Module = _Whole(detector) if whole else _Network(detector)
    else:
        module = pixels = PixelsToVerdict(detector, _Network(detector), camera)
        example, free = pixels.example(), {0: free[0]}
    with torch.no_grad():
        outputs = module(example)  # also because values that are computed once aren't traced
    described = _described(detector, outputs, whole=whole) if camera is None else pixels.described()
    stem = "whole" if whole else "network"
    name = graph_names(engine, stem)[0]
    file = folder / f"{stem}.onnx"
    _trace(module, example, free, list(described), file)
    inputs, kept = _tidied(file, described)
    if ENGINES[engine][2] != ".onnx":
        openvino = installed(engine, "this export is for")
        model = openvino.Core().read_model(file)
        try:
            openvino.save_model(model, folder / name, compress_to_fp16=False)
        except RuntimeError:  # doesn't report the system's error
            raise OSError(errno.ENOSPC, "No space left on device") from None
        for part in folder.glob(f"{file.name}*"):
            part.unlink()
    return {"file": name, "inputs": inputs, "outputs": kept}


def _example(detector: Model) -> tuple[Tensor, dict[int, Any]]:
    """Images to trace with, and the axes whose length may be another one."""
    sizing = detector.loading.sizing
    batch = torch.export.Dim("batch", min=1, max=_LARGEST)
    if sizing.only is not None:
        return torch.rand(2, 3, *sizing.only), {0: batch}
    rows, columns = (torch.export.Dim(n, min=1, max=_LARGEST) for n in ("rows", "columns"))
    step = sizing.multiple
    images = torch.rand(2, 3, *(step * -(-side // step) for side in (128, 160)))
    return images, {0: batch, 2: step * rows, 3: step * columns}


def _trace(
    module: nn.Module, example: Tensor, free: dict[int, Any], names: list[str], file: Path
) -> None:
    try:
        with _quiet(), torch.no_grad():
            traced = torch.export.export(
                module.eval(), (example,), dynamic_shapes=(free,), strict=False
            )
            program = torch.onnx.export(
                resampled_by_products(traced),
                (example,),
                input_names=names[:1],
                output_names=names[1:],
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception:  # of many types, about operators and symbols
        raise ModelError(
            "this network can't be written as a graph: its steps depend on the image, or it uses "
            "an operation that ONNX lacks; train with another backbone, or hook earlier layers"
        ) from None
    assert program is not None
    program.save(file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries' messages about operators and symbols."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _tidied(
    file: Path, described_as: _Described
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Remove this machine's paths and source lines from a graph, and name its axes.

    Returns:
        Its inputs and outputs.
    """
    import onnx

    model = onnx.load(file, load_external_data=False)
    for part in (model, model.graph, *model.graph.node, *model.graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    del model.graph.value_info[:]
    described: list[dict[str, Any]] = []
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
        kind, (meaning, lengths) = value.type.tensor_type, described_as[value.name]
        for axis, length in zip(kind.shape.dim, lengths, strict=True):
            if isinstance(length, str):
                axis.dim_param = length
        number = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        number = {"float": "float32"}.get(number, number)
        described.append({"name": value.name, "type": number, "shape": lengths, "meaning": meaning})
    onnx.save(model, file)
    onnx.checker.check_model(file, full_check=True)  # and infers all shapes strictly
    return described[:1], described[1:]
