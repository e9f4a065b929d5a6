"""Gradients during training: recorded layer by layer, drawn, and held within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anomaly.errors import LayerError
from anomaly.explain.pictures import LINE_HEIGHT, RgbImage, beside, colored, shortened, text_line
from anomaly.hooks import HookSet
from anomaly.hooks.paths import Selector, match, resolve

_LOW, _HIGH = -12.0, 4.0
_BINS = 32
_LABEL, _PANEL = 190, 420
_RED = (220, 30, 30)


@dataclass(frozen=True)
class GradientRecord:
    """What a monitor saw: S steps, L layers, K bins.

    Attributes:
        layers: the L paths.
        norms: (S, L), the L2 norm of all gradients of the layer's own parameters; NaN or inf where
            a value wasn't finite, 0 where the layer got no gradient.
        nonfinite: (S, L), how many values were NaN or infinite.
        histograms: (S, L, K), how many absolute values fell between two edges. Zeros are left out,
            values beyond the ends are counted in the first and the last bin.
        edges: (K + 1,), powers of ten from 1e-12 to 1e4.
    """

    layers: tuple[str, ...]
    norms: NDArray[np.float64]
    nonfinite: NDArray[np.int64]
    histograms: NDArray[np.int64]
    edges: NDArray[np.float64]


class GradientMonitor:
    """Records the gradients of each layer's parameters through tensor hooks, before any clipping.

    Example:
        with GradientMonitor(model) as monitor:
            for images, labels in batches:
                optimizer.zero_grad()
                loss(model(images), labels).backward()
                optimizer.step()
                monitor.step()
        picture = draw_gradients(monitor.record())

    Several backward passes within one step add up: squared norms, counts and histograms.

    Args:
        model: any network.
        layers: which layers are watched, see `anomaly.hooks.match`; of these, the ones that hold
            trainable parameters themselves.

    Raises:
        LayerError: none of them holds a trainable parameter, or one gets its weights in its first
            pass.
    """

    def __init__(self, model: nn.Module, layers: Selector | Sequence[Selector] = nn.Module) -> None:
        self._hooks = HookSet(model)
        self._parameters = _trainable(model, layers)
        self._rows: list[NDArray[np.float64]] = []
        self._current = self._zeros()

    def __enter__(self) -> GradientMonitor:
        for index, parameters in enumerate(self._parameters.values()):
            for parameter in parameters:
                self._hooks.tensor(parameter, self._add, index)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def step(self) -> None:
        """End a training step: what comes next belongs to the next one."""
        self._rows.append(np.stack([sums.cpu().numpy() for sums in self._current]))
        self._current = self._zeros()

    def record(self) -> GradientRecord:
        """Everything recorded up to the last `step`."""
        sums = np.array(self._rows).reshape(-1, len(self._parameters), 2 + _BINS)
        return GradientRecord(
            layers=tuple(self._parameters),
            norms=np.sqrt(sums[..., 0]),
            nonfinite=sums[..., 1].astype(np.int64),
            histograms=sums[..., 2:].astype(np.int64),
            edges=np.logspace(_LOW, _HIGH, _BINS + 1),
        )

    def _add(self, gradient: Tensor, index: int) -> None:
        # Added up on the gradient's device: reading numbers here would wait for the GPU.
        self._current[index] = self._current[index].to(gradient.device) + _measured(gradient)

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(2 + _BINS, dtype=torch.float64) for _ in self._parameters]


def limit_norm(gradient: Tensor, max_norm: float) -> Tensor:
    """A gradient (of any shape) scaled down to an L2 norm of at most `max_norm`; a tensor hook."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm = torch.linalg.vector_norm(values if values.is_complex() else values.float())
    scale: Tensor = (max_norm / norm).clamp(max=1)
    return gradient * scale.to(gradient.dtype)


def clip_gradients(
    model: nn.Module, max_norm: float, layers: Selector | Sequence[Selector] = nn.Module
) -> HookSet:
    """Clip the gradient of each parameter by itself, as soon as it is in `parameter.grad`.

    Unlike `torch.nn.utils.clip_grad_norm_`, which scales all of them together after the backward
    pass. Where gradients are accumulated over several passes, their sum is clipped after each of
    them, so that it never exceeds the bound.

    Args:
        model: any network.
        max_norm: the largest L2 norm of one parameter's gradient, above 0.
        layers: see `anomaly.hooks.match`.

    Returns:
        The hooks; use it in a `with` statement around the training, or call its `remove`.

    Raises:
        LayerError: `max_norm` isn't above 0, no layer holds a trainable parameter, or one gets its
            weights in its first pass.
    """
    if not max_norm > 0:
        raise LayerError(f"max_norm={max_norm}: gradients can only be clipped to a norm above 0")
    hooks = HookSet(model)
    for parameters in _trainable(model, layers).values():
        for parameter in parameters:
            hooks.accumulated(parameter, _clip, max_norm)
    return hooks


def _clip(parameter: Tensor, max_norm: float) -> None:
    if parameter.grad is not None:
        parameter.grad = limit_norm(parameter.grad, max_norm)


def draw_gradients(record: GradientRecord) -> RgbImage:
    """Draw a record: one line a layer; its norm over the steps, and how its values spread.

    Both are on a logarithmic scale, brighter is more (in the second panel within each line). Steps
    with NaN or infinite values are red.

    Returns:
        (H, W, 3) RGB.
    """
    with np.errstate(divide="ignore"):
        norms = np.log10(record.norms.T)
    over_steps = colored(norms)
    over_steps[record.nonfinite.T > 0] = _RED
    totals = np.log1p(record.histograms.sum(axis=0))
    spread = colored(totals / np.maximum(totals.max(axis=1, keepdims=True), 1))
    labels = [text_line(shortened(layer, _LABEL), _LABEL) for layer in record.layers]
    finite = norms[np.isfinite(norms)]
    span = f"1e{finite.min():.1f} to 1e{finite.max():.1f}" if finite.size else "none finite"
    return beside(
        [
            ("layer", np.vstack(labels)),
            (f"norm by step, {span}", _panel(over_steps)),
            (f"|gradient| of all steps, 1e{_LOW:.0f} to 1e{_HIGH:.0f}", _panel(spread)),
        ]
    )


def _measured(gradient: Tensor) -> Tensor:
    """(2 + K,) float64: sum of squares, count of non-finite values, histogram of the rest."""
    if gradient.is_sparse:  # the rest is zero
        gradient = gradient.coalesce().values()
    values = gradient.detach().abs().double().flatten()
    finite = values.isfinite()
    exponents = values[finite & (values > 0)].log10().clamp(_LOW, _HIGH)
    counts = torch.stack([values.square().sum(), (~finite).sum()])
    return torch.cat([counts, exponents.histc(_BINS, _LOW, _HIGH)])


def _trainable(
    model: nn.Module, layers: Selector | Sequence[Selector]
) -> dict[str, list[nn.Parameter]]:
    trainable: dict[str, list[nn.Parameter]] = {}
    # Hooks on parameters are called in compiled and scripted code, too, where those on layers
    # aren't, which `select` refuses.
    patterns = [layers] if isinstance(layers, str | type) else layers
    for path in dict.fromkeys(path for pattern in patterns for path in match(model, pattern)):
        own = resolve(model, path)[1].parameters(recurse=False)
        parameters = [parameter for parameter in own if parameter.requires_grad]
        if any(map(is_lazy, parameters)):
            raise LayerError(f"{path!r} has no weights before its first pass: run the network once")
        if parameters:
            trainable[path] = parameters
    if not trainable:
        raise LayerError(
            f"no layer of {type(model).__name__} matching {layers!r} holds a "
            "parameter with requires_grad: name others, or unfreeze them"
        )
    return trainable


def _panel(cells: RgbImage) -> RgbImage:
    rows, columns = cells.shape[:2]
    if not columns:
        return np.full((rows * LINE_HEIGHT, _PANEL, 3), 255, np.uint8)
    at = np.arange(_PANEL) * columns // _PANEL
    return np.repeat(cells[:, at], LINE_HEIGHT, axis=0)
