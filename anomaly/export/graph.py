"""A model as a graph in a file: images -> patch embeddings, or camera pixels -> verdict."""

from __future__ import annotations

import errno
import logging
import math
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from anomaly.backbones.engine import ENGINES, import_engine
from anomaly.backbones.extractor import folded
from anomaly.backbones.networks import build, load_state
from anomaly.config.schema import METHODS
from anomaly.errors import ModelError
from anomaly.hooks import HookSet, capture
from anomaly.imaging.geometry import patch_mask, resampling_matrix
from anomaly.maps.anomaly_map import LEAST_WEIGHT, map_matrix
from anomaly.methods.base import PatchScores
from anomaly.scoring.image_statistics import (
    BLANK,
    FARTHER,
    LEAST_DISTANCE,
    QUIET,
    TrainingStatistics,
)
from anomaly.scoring.model import Model, network_map

_RESAMPLE = torch.ops.aten._upsample_bicubic2d_aa.vec


def resampled_by_products(traced: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A traced program in which antialiased bicubic resampling is replaced by equal operations.

    Transformers resample the positions of patches in that way. OpenVINO 2026.4 leaves out the
    antialiasing, which changes scores by a third for small grids.
    """
    if any(node.target is _RESAMPLE for node in traced.graph.nodes):
        traced = traced.run_decompositions({_RESAMPLE: bicubic_antialiased})
    return traced


def bicubic_antialiased(
    maps: Tensor, size: list[int], align_corners: bool, scale_factors: Any = None
) -> Tensor:
    """`torch.nn.functional.interpolate(mode="bicubic", antialias=True)`, by matrix products.

    Args:
        maps: (B, C, H, W).
        size: (h, w) of the result.
        align_corners: ignored; positions of patches are resampled without it.
        scale_factors: ignored, since the size is given.

    Returns:
        (B, C, h, w).
    """
    rows, columns = (
        _weights(target, source, maps) for target, source in zip(size, maps.shape[2:], strict=True)
    )
    return rows @ maps @ columns.T


def _weights(target: int, source: int, like: Tensor) -> Tensor:
    """Weights (target, source) of source positions at target positions: Keys's cubic, a = -0.5.

    Where sides shrink, the cubic is widened by their ratio, which is the antialiasing.
    """
    targets = torch.arange(target, device=like.device, dtype=like.dtype) + 0.5
    sources = torch.arange(source, device=like.device, dtype=like.dtype) + 0.5
    scale = source / torch.ones_like(targets).sum()  # their number may be unknown while tracing
    distance = ((sources - targets[:, None] * scale) / scale.clamp(min=1)).abs()
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)


OPSET = 18
_LARGEST = 1 << 16  # of the batch, and of height and width in multiples: more than any image has

# Meaning and lengths of the axes by name: first of the input, then of the outputs.
_Described: TypeAlias = dict[str, tuple[str, list[int | str]]]


class _Network(nn.Module):
    """Images (B, 3, H, W) in [0, 1] -> patch embeddings (B, h, w, D)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = _padded_alike(_whole_network(model), _example(model)[0])
        self._model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        # Without the early stop, which a trace can't follow: layers after the last hooked one
        # aren't used, so they aren't in the graph.
        extractor = self._model.extractor
        with capture(self.network, extractor.layers) as captured:
            captured.run(self._model.normalise(images))
            maps = extractor.maps_of(captured.pop(), images)
        return (self._model.scorer.align(maps),)

    def described(self) -> _Described:
        """Meaning and lengths of the axes of the input and of the output, by name."""
        model, sides = self._model, self._model.loading.sizing.fixed_size
        meaning = (
            "RGB in [0, 1], full scale of the file's depth is 1, resized as config.yaml says; the "
            "graph normalises"
        )
        images: list[int | str] = ["batch", 3, "height", "width"]
        embeddings: list[int | str] = ["batch", "h", "w", model.scorer.dimensions]
        if sides is None:
            multiple = model.loading.sizing.multiple
            meaning += f"; height and width are multiples of {multiple}"
        else:
            images[2:], embeddings[1:3] = sides, model.embedder.grid(sides)
        return {"images": (meaning, images), "embeddings": ("patch embeddings", embeddings)}


def _whole_network(model: Model) -> nn.Module:
    """A model's network with all of its layers, batch norms folded into convolutions.

    The model's own network stops at the last hooked layer, and its later layers pass values on. A
    graph can't stop, so here these layers run, with zeros as weights.

    Raises:
        ModelError: the network can't run to its end.
    """
    extractor, name = model.extractor, model.config.backbone.name
    images, _ = _example(model)
    whole, state = build(name), extractor.network.state_dict()
    zeros = {
        key: torch.zeros(like.shape, dtype=like.dtype)
        for key, like in whole.state_dict().items()
        if key not in state
    }
    load_state(whole, state | zeros, whole, name)
    whole = folded(whole.eval(), extractor.pairs, torch.float32)
    try:
        with torch.inference_mode():
            whole(images)
    except Exception:  # of any type: foreign code runs on shapes that it wasn't written for
        height, width = images.shape[2:]
        raise ModelError(
            f"this network can't be written as a graph: {name} doesn't run to its end on images of "
            f"{height}×{width}; train with another backbone"
        ) from None
    return whole


def _padded_alike(network: nn.Module, images: Tensor) -> nn.Module:
    """The network, changed so that its convolutions pad images of any size as they pad `images`.

    timm's networks from TensorFlow compute the padding from their input's size, which takes a trace
    minutes. Sides of images are multiples of the coarsest stride, so one padding fits all sizes.
    """
    paths = [n for n, m in network.named_modules() if type(m).__name__ == "Conv2dSame"]
    if not paths:
        return network
    from timm.layers.padding import pad_same_arg

    with torch.inference_mode(), HookSet(network) as hooks:
        shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            hooks.forward_pre(
                path, lambda _, inputs, path: shapes.update({path: inputs[0].shape}), path
            )
        network(images)
    for path, shape in shapes.items():
        same: Any = network.get_submodule(path)
        sides: Any = pad_same_arg(list(shape[2:]), same.kernel_size, same.stride, same.dilation)
        plain = nn.Conv2d(
            same.in_channels, same.out_channels, same.kernel_size, same.stride, 0, same.dilation,
            same.groups, bias=same.bias is not None,
        )  # fmt: skip
        plain.load_state_dict(same.state_dict())
        network.set_submodule(path, nn.Sequential(nn.ZeroPad2d(sides), plain))
    return network


def write_graph(
    model: Model, folder: Path, engine: str, camera: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Write a model's graph, as `network` or, from pixels, as `whole`.

    Args:
        model: on the CPU, in fp32.
        folder: folder for the graph's files.
        engine: a key of `anomaly.backbones.engine.ENGINES`, which decides the file format.
        camera: (H0, W0) of the raw RGB images that the graph takes and judges; None for a graph
            from network inputs to patch embeddings.

    Returns:
        File, inputs and outputs of the graph, as in export.json.

    Raises:
        ModelError: the network or the method can't be traced.
        DataError: the model doesn't take such images.
        OSError: the disk is full.
    """
    module: _Network | PixelsToVerdict = _Network(model)
    stem, (example, free) = "network", _example(model)
    if camera is not None:
        module, stem = PixelsToVerdict(model, module, camera), "whole"
        # A camera's images have one size: the batch alone is free.
        example, free = torch.randint(0, 256, (2, *camera, 3), dtype=torch.uint8), {0: free[0]}
    with torch.no_grad():
        module(example)  # fills caches, so that the trace holds their values as constants
    described = module.described()
    file = folder / f"{stem}.onnx"
    _trace(module, example, free, list(described), file)
    inputs, outputs = _tidy(file, described)
    _, _, suffix = ENGINES[engine]
    if suffix != ".onnx":
        openvino = import_engine(engine, "this export is for")
        network = openvino.Core().read_model(file)
        try:
            openvino.save_model(network, file.with_suffix(suffix), compress_to_fp16=False)
        except RuntimeError:  # OpenVINO hides the system's error, which is a full disk in general
            raise OSError(errno.ENOSPC, "No space left on device") from None
        for part in folder.glob(f"{file.name}*"):
            part.unlink()
    return {"file": f"{stem}{suffix}", "inputs": inputs, "outputs": outputs}


def _example(model: Model) -> tuple[Tensor, dict[int, Any]]:
    """Random images (2, 3, H, W) to trace with, and the free axes of the graph's input.

    Two images, since a trace takes an axis of length 1 as fixed.
    """
    sizing = model.loading.sizing
    batch = torch.export.Dim("batch", min=1, max=_LARGEST)
    if sizing.fixed_size is not None:
        return torch.rand(2, 3, *sizing.fixed_size), {0: batch}
    rows, columns = (torch.export.Dim(n, min=1, max=_LARGEST) for n in ("rows", "columns"))
    step = sizing.multiple
    # Sides that differ, so that the trace doesn't take one for the other.
    images = torch.rand(2, 3, *(step * -(-side // step) for side in (128, 160)))
    return images, {0: batch, 2: step * rows, 3: step * columns}


def _trace(
    module: nn.Module, example: Tensor, free: dict[int, Any], names: list[str], file: Path
) -> None:
    """Write a module of one input and a tuple of outputs as an ONNX file, without messages.

    Axes of the input in `free` may have another length than in `example`. The names are those of
    the input and the outputs.

    Raises:
        ModelError: the module can't be traced.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
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
    except Exception:  # of many types: torch reports operators and symbols by its own
        raise ModelError(
            "this network can't be written as a graph: its steps depend on the image, or it uses "
            "an operation that ONNX lacks; train with another backbone, or hook earlier layers"
        ) from None
    finally:
        logging.disable(disabled)
    assert program is not None
    program.save(file)


def _tidy(file: Path, meanings: _Described) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Remove this machine's paths and source lines from an ONNX file, and name the graph's axes.

    Returns:
        Inputs and outputs of the graph, as in export.json.
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
        kind, (meaning, lengths) = value.type.tensor_type, meanings[value.name]
        for axis, length in zip(kind.shape.dim, lengths, strict=True):
            if isinstance(length, str):
                axis.dim_param = length
        number = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
        number = {"float": "float32"}.get(number, number)
        described.append({"name": value.name, "type": number, "shape": lengths, "meaning": meaning})
    onnx.save(model, file)
    onnx.checker.check_model(file, full_check=True)  # and infers all shapes strictly
    return described[:1], described[1:]


def check_pixels(model: Model) -> None:
    """Refuse a model whose verdict a graph from pixels can't compute.

    Raises:
        ModelError: with the reason.
    """
    config = model.config
    if config.image.tile is not None:
        why = "it cuts images into tiles (image.tile)"
    elif model.reference is not None:
        why = "it finds the part's pose first (image.align)"
    elif config.image_score_in_force in METHODS[config.model.kind].image_scores:
        why = f"its image score, {config.image_score_in_force}, searches the memory bank again"
    elif config.model.smallest_defect is not None:
        why = "the size of regions decides its image score (model.smallest_defect)"
    elif model.thresholds is None:
        why = "it has no thresholds (set them with anomaly calibrate)"
    else:
        return
    raise ModelError(f"this model can't be a graph from pixels to the verdict: {why}")


class PixelsToVerdict(nn.Module):
    """Pixels (B, H0, W0, 3) uint8 -> verdict, score, reason, anomaly map, patch scores.

    Args:
        model: on the CPU, in fp32; `check_pixels` has passed it.
        embed: images (B, 3, H, W) in [0, 1] -> embeddings (B, h, w, D), in a tuple.
        camera: (H0, W0) of the pixels.

    Raises:
        DataError: the model doesn't take images of this size.
    """

    def __init__(self, model: Model, embed: nn.Module, camera: tuple[int, int]) -> None:
        super().__init__()
        self.embed, self.score = embed, model.scorer.graph()
        self._model, self._camera = model, camera
        self._view = view = model.loading.sizing.view(camera)
        self._grid = grid = model.embedder.grid(view.size)
        self._resample = [_tensor(resampling_matrix(axis)) for (axis,) in view.axes]
        smoothing = model.config.model.smoothing
        self._map_axes = [
            _tensor(map_matrix(count, axis, smoothing))
            for count, (axis,) in zip(grid, view.axes, strict=True)
        ]
        self._inside: Tensor | None = None
        self._pixels_inside: Tensor | bool = True
        if model.region is not None:
            self._inside = torch.from_numpy(patch_mask(model.region, view, grid))[None]
            self._pixels_inside = torch.from_numpy(model.region.inside(camera))
        self._top = self._top_count()
        self._review_reasons = _ReviewReasons(model, self._inside, grid, view.size)

    def _top_count(self) -> int:
        """Number of values in the highest 1 %, at least 1, for image scores that are their mean."""
        of_map = self._model.config.image_score_in_force.startswith("map_")
        size = self._view.size if of_map else self._grid
        # A map of zeros, which is NaN where nothing counts.
        values = network_map(torch.zeros(1, *self._grid), size, 0.0, self._inside)
        return max(1, round(int((~values.isnan()).sum()) / 100))

    def described(self) -> _Described:
        """Meaning and lengths of the axes of the input and of the outputs, by name."""
        height, width = self._camera
        return {
            "pixels": ("RGB, 8 bits, raw camera pixels", ["batch", height, width, 3]),
            "verdict": ("0 good, 1 review, 2 reject", ["batch"]),
            "score": ("image score, higher is more anomalous", ["batch"]),
            "reason": (
                "why the image isn't good, whatever its score: 1 it is blank; its 2 brightness, "
                "3 contrast, 4 sharpness is far outside the training images'; 5 it looks like "
                "another product; 0 no reason",
                ["batch"],
            ),
            "anomaly_map": (
                "score of each pixel of the image; NaN where nothing counts",
                ["batch", height, width],
            ),
            "patch_scores": (
                "score of each patch of the network's input; NaN where it doesn't count",
                ["batch", *self._grid],
            ),
        }

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs, in the order of `described`."""
        images = pixels.permute(0, 3, 1, 2).float() / 255
        rows, columns = self._resample
        images = rows @ images @ columns.T
        (embeddings,) = self.embed(images)
        scores, *nearest = self.score(embeddings)
        patches = PatchScores(scores, nearest[0] if nearest else None)
        pieces = [(self._view, (0, 0), 0)]
        shown, values = self._model.image_scores_of(
            patches, embeddings, pieces, self._inside, self._top
        )
        reason = self._review_reasons(images, embeddings)
        limits = self._model.thresholds
        assert limits is not None  # `check_pixels` refuses models without thresholds
        # 2 reject, less 1 for each threshold that isn't exceeded. NaN isn't at most a threshold:
        # such an image is rejected.
        verdict = 2 - (values <= limits.review).long() - (values <= limits.image).long()
        verdict = torch.maximum(verdict, (reason > 0).long())
        return verdict, values, reason, self._anomaly_map(shown.scores), shown.scores

    def _anomaly_map(self, scores: Tensor) -> Tensor:
        """Anomaly maps (B, H0, W0) of patch scores (B, h, w), as in `anomaly.maps.anomaly_map`."""
        rows, columns = self._map_axes
        if self._inside is not None:
            scores = torch.where(self._inside, scores, 0.0)
        # Lowers patches beside a higher one, as `without_halo` does.
        highest = F.max_pool2d(scores[:, None], 3, stride=1, padding=1)[:, 0]
        share = scores / highest.clamp(min=float(np.finfo(np.float32).tiny))
        damped = scores * share**self._model.config.model.halo_damping
        maps = rows @ damped @ columns.T
        if self._inside is None:
            return maps
        weights = rows @ self._inside.float() @ columns.T
        # Beside a region's border the mean is taken over the patches inside it alone.
        seen = (weights > LEAST_WEIGHT) & self._pixels_inside
        return torch.where(seen, maps / torch.where(seen, weights, 1.0), math.nan)


class _ReviewReasons(nn.Module):
    """Network inputs and their embeddings -> codes of reasons for review (B,) int64, 0 for none.

    The checks are those of `anomaly.scoring.image_statistics`.

    Args:
        model: the trained model.
        inside: (1, h, w) bool, the patches that count; None for all.
        grid: (h, w) of the patches.
        size: (H, W) of the network inputs.
    """

    def __init__(
        self, model: Model, inside: Tensor | None, grid: tuple[int, int], size: tuple[int, int]
    ) -> None:
        super().__init__()
        self._learned = model.training_statistics
        if self._learned is not None and not self._learned.is_reliable:
            self._learned = None
        self._turned = model.config.model.turned_copies != "none"
        self._patches = torch.ones(grid, dtype=torch.bool) if inside is None else inside[0]
        patches = self._patches.numpy().astype(np.uint8)
        shown = cv2.resize(patches, size[::-1], interpolation=cv2.INTER_NEAREST)
        self._pixels = torch.from_numpy(shown > 0)
        # Numbers of patches and pixels that count: plain, so a trace treats them as constants.
        self._counts = int(patches.sum()), int(shown.sum())

    def forward(self, images: Tensor, embeddings: Tensor) -> Tensor:
        """Code (B,) of the first reason that applies to each image, as in `described`; else 0."""
        light = images.mean(1)
        padded = F.pad(light[:, None], (1, 1, 1, 1), mode="reflect")[:, 0]
        neighbours = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1]
        neighbours = neighbours + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
        mean = self._mean(light)
        contrast = self._mean((light - mean[:, None, None]).square()).sqrt()
        sharpness = self._mean((neighbours - 4 * light).abs()) / contrast.clamp(min=QUIET)
        darkest = torch.where(self._pixels, light, math.inf).amin((1, 2))
        brightest = torch.where(self._pixels, light, -math.inf).amax((1, 2))
        tests = [brightest - darkest <= BLANK]
        if self._learned is not None:
            figures = {"brightness": mean, "contrast": contrast, "sharpness": sharpness}
            for name, values in figures.items():
                low, high = self._learned.ranges[name]
                tests.append((values < low) | (values > high))
            if not self._turned:
                tests.append(self._is_foreign(embeddings, self._learned))
        reason = torch.zeros_like(mean, dtype=torch.int64)
        # The first reason wins, so it is filled in last.
        for code, test in reversed([*enumerate(tests, 1)]):
            reason = torch.where(test, code, reason)
        return reason

    def _mean(self, values: Tensor) -> Tensor:
        """Means (B,) over the pixels (B, H, W) that count."""
        return (values * self._pixels).sum((1, 2)) / self._counts[1]

    def _is_foreign(self, embeddings: Tensor, learned: TrainingStatistics) -> Tensor:
        """(B,) bool: True for images that show another product than the training images."""
        mean = (embeddings * self._patches[..., None]).sum((1, 2)) / self._counts[0]
        difference = mean - _tensor(learned.mean)
        standardised = difference / _tensor(learned.deviations(learned.variance))
        deviation = standardised.square().mean(-1).sqrt()
        distance = difference.square().mean(-1).sqrt() / learned.spread
        return (deviation > FARTHER * learned.seen_distance) & (distance > LEAST_DISTANCE)


def _tensor(values: NDArray[np.floating[Any]]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
