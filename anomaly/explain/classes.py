"""What a classifier looks at for each of several classes, on one page."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from anomaly.explain.grad_cam import grad_cam, guided_grad_cam
from anomaly.explain.overlays import glowing, signed
from anomaly.explain.patches import marked
from anomaly.explain.tiles import Picture, beside, stacked

_SIDE = 320


def can_be_guided(model: nn.Module) -> bool:
    """Whether guided backpropagation is defined: the network has ReLU layers."""
    return any(isinstance(module, nn.ReLU | nn.ReLU6) for module in model.modules())


def class_evidence(
    model: nn.Module, image: Tensor, picture: Picture, layer: str, classes: Mapping[int, str]
) -> Picture:
    """A line for each class: the image, Grad-CAM and, where the network allows it, its guided form.

    Args:
        model: a classifier in eval mode.
        image: (3, H, W), normalised as the network wants it, on the network's device.
        picture: the same for the eye, (H, W, 3) uint8.
        layer: where Grad-CAM looks, see `grad_cam`.
        classes: index to caption.

    Returns:
        (H', W', 3) RGB.
    """
    seen = marked(picture, [], _SIDE)
    guided = can_be_guided(model)
    lines = []
    for target, caption in classes.items():
        cam = grad_cam(model, image, layer, target)
        panels = [(caption, seen), (f"Grad-CAM at {layer}", glowing(seen, cam))]
        if guided:
            details = signed(guided_grad_cam(model, image, layer, target))
            panels.append(("guided Grad-CAM", marked(details, [], _SIDE)))
        lines.append(beside(panels))
    return stacked(lines)
