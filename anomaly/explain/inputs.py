"""What is to be explained, seen to before a network meets it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from anomaly.errors import AnomalyError
from anomaly.features.extractor import layout_of


def batch_of(image: Tensor, model: nn.Module | None = None) -> Tensor:
    """One image as a batch (1, 3, H, W).

    Args:
        image: (3, H, W), finite floats.
        model: the network that is to see it, whose number format it takes on.

    Raises:
        AnomalyError: it is something else.
    """
    if not isinstance(image, Tensor):
        raise AnomalyError(
            f"the image is a {type(image).__name__}: give a tensor (3, H, W), normalised as the "
            "network wants it; the transforms of its weights make one"
        )
    if image.ndim != 3:
        hint = ", images[0] say" if image.ndim == 4 else ""
        raise AnomalyError(
            f"the image has shape {tuple(image.shape)}: give one image, (3, H, W){hint}"
        )
    if not image.is_floating_point():
        raise AnomalyError(
            f"the image holds {str(image.dtype).removeprefix('torch.')}: give floats, normalised "
            "as the network wants them"
        )
    if not image.isfinite().all():
        raise AnomalyError("the image holds NaN or infinite values: every layer would, too")
    weights = () if model is None else model.parameters()
    formats = (weight.dtype for weight in weights if weight.is_floating_point())
    return image[None].to(next(formats, image.dtype))


def map_of(output: Tensor, size: Sequence[int]) -> Tensor:
    """A layer's output as a feature map (1, C, h, w), where it is one in another order.

    Args:
        output: of one image: a map, Swin's form of one (1, h, w, C), or a transformer's tokens
            (1, N, C), of which those of the patches are taken. Anything else stays as it is.
        size: (H, W) of the image.
    """
    layout = layout_of(output.shape, size)
    return layout.map_of(output, size) if layout else output


def check_eval(model: nn.Module) -> None:
    """See that a pass leaves a network as it is: in train mode batch norms learn from each one.

    Raises:
        AnomalyError: it is in train mode.
    """
    moved = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    if any(module.training and isinstance(module, moved) for module in model.modules()):
        raise AnomalyError(
            f"{type(model).__name__} is in train mode, in which batch norms would learn from the "
            "image and dropout would blur the answer: call model.eval() before"
        )
