"""Which pixels move a score: its gradient with respect to the image, plain and guided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anomaly.errors import AnomalyError, LayerError
from anomaly.explain.inputs import batch_of, check_eval
from anomaly.hooks import HookSet


def image_gradient(score: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """The gradient of a score with respect to an image.

    Args:
        score: takes the image as a batch (1, 3, H, W) and returns one number, computed with
            differentiable operations all the way.
        image: (3, H, W), normalised as the network wants it.

    Returns:
        (3, H, W), in score units per unit of the normalised image. Gradients of parameters are
        left alone.

    Raises:
        AnomalyError: the score isn't one number or can't be differentiated, or it isn't an image
            (3, H, W) of finite floats.
    """
    batch = batch_of(image)
    with torch.inference_mode(False), torch.enable_grad():
        batch = batch.detach().clone().requires_grad_()
        value = score(batch)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise AnomalyError(f"the score has shape {tuple(value.shape)}, not one number")
        gradient = None
        if isinstance(value, Tensor) and value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), batch, allow_unused=True)
        if gradient is None:
            raise AnomalyError(
                "the score doesn't depend on the image by differentiable operations: compute it "
                "in torch (not faiss or NumPy), outside no_grad and inference_mode"
            )
    return gradient[0]


def guided_backpropagation(
    model: nn.Module, score: Callable[[Tensor], Tensor], image: Tensor
) -> Tensor:
    """`image_gradient` where every ReLU passes on positive gradients only.

    Springenberg et al., "Striving for Simplicity", 2015: shows what speaks for the score and hides
    what speaks against it. The ReLUs have to be layers; functional ones are passed as usual.

    Args:
        model: the network that `score` runs.
        score: as in `image_gradient`.
        image: (3, H, W).

    Returns:
        (3, H, W).

    Raises:
        LayerError: the network has no ReLU or ReLU6 layer.
        AnomalyError: it is in train mode; or as `image_gradient`.
    """
    check_eval(model)
    activations = [
        kind for kind in (nn.ReLU, nn.ReLU6) if any(isinstance(m, kind) for m in model.modules())
    ]
    if not activations:
        raise LayerError(
            f"guided backpropagation is defined by ReLU layers, and {type(model).__name__} has "
            "none: use the plain gradient or Grad-CAM"
        )
    with HookSet(model) as hooks:
        hooks.backward(activations, _only_positive)
        return image_gradient(score, batch_of(image, model)[0])


def saliency_map(gradient: Tensor) -> NDArray[np.float32]:
    """One number a pixel: the largest absolute gradient over the colours.

    Simonyan et al., "Deep Inside Convolutional Networks", 2014, section 3.1. Divided by its 99.5th
    percentile, so that a few pixels don't darken the rest.

    Args:
        gradient: (3, H, W).

    Returns:
        (H, W) in [0, 1].
    """
    strongest = gradient.detach().abs().amax(dim=0).float().cpu().numpy()
    top = float(np.percentile(strongest, 99.5))
    if top == 0:
        top = float(strongest.max()) or 1.0
    return np.asarray(np.clip(strongest / top, 0, 1), np.float32)


def _only_positive(module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor, ...]:
    return tuple(gradient.clamp(min=0) for gradient in grad_input)
