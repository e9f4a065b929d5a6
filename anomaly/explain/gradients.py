"""Gradients during training, recorded layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anomaly.errors import LayerError
from anomaly.hooks import HookSet
from anomaly.hooks.paths import Selector, match, resolve


@dataclass(frozen=True)
class GradientRecord:
    """The gradients that a monitor saw: S steps, L layers.

    Attributes:
        layers: the L paths.
        norms: (S, L), the L2 norm of all gradients of the layer's own parameters; NaN or inf where
            a value wasn't finite, 0 where the layer got no gradient.
        nonfinite: (S, L), how many values were NaN or infinite.
    """

    layers: tuple[str, ...]
    norms: NDArray[np.float64]
    nonfinite: NDArray[np.int64]


class GradientMonitor:
    """Records the gradients of each layer's parameters through tensor hooks, before any clipping.

    Example:
        with GradientMonitor(model) as monitor:
            for images, labels in batches:
                optimizer.zero_grad()
                loss(model(images), labels).backward()
                optimizer.step()
                monitor.step()
        print(monitor.record().norms)

    Several backward passes within one step add up: squared norms and counts.

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
        # Hooks on parameters are called in compiled code, too, where those on layers aren't.
        patterns = [layers] if isinstance(layers, str | type) else layers
        paths = dict.fromkeys(path for pattern in patterns for path in match(model, pattern))
        own = {path: resolve(model, path)[1].parameters(recurse=False) for path in paths}
        trainable = {
            path: [p for p in of_layer if p.requires_grad] for path, of_layer in own.items()
        }
        self._parameters = {path: kept for path, kept in trainable.items() if kept}
        if not self._parameters:
            raise LayerError(
                f"no layer of {type(model).__name__} matching {layers!r} holds a "
                "parameter with requires_grad: name others, or unfreeze them"
            )
        if any(map(is_lazy, chain(*self._parameters.values()))):
            raise LayerError("layers have no weights before their first pass: run the network once")
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
        sums = np.array(self._rows).reshape(-1, len(self._parameters), 2)
        norms, nonfinite = np.sqrt(sums[..., 0]), sums[..., 1].astype(np.int64)
        return GradientRecord(tuple(self._parameters), norms, nonfinite)

    def _add(self, gradient: Tensor, index: int) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = values.detach().abs().double()
        # Added up on the gradient's device: reading numbers here would wait for the GPU.
        sums = torch.stack([values.square().sum(), (~values.isfinite()).sum()])
        self._current[index] = self._current[index].to(gradient.device) + sums

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(2, dtype=torch.float64) for _ in self._parameters]
