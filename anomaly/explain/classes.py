"""What a classifier sees in an image, and what it looks at for each of several classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from anomaly.backbones.layer_table import last_map, layer_table, side_multiple, stages, token_layer
from anomaly.backbones.registry import backbone_of, build, full_network, normalisation
from anomaly.errors import AnomalyError
from anomaly.explain.evidence import Findings, read_one
from anomaly.explain.patches import marked
from anomaly.explain.pictures import RgbImage, beside, glowing, picture_of, signed, stacked
from anomaly.explain.saliency import grad_cam, guided_grad_cam
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import Preprocessing
from anomaly.imaging.read import MAX_PIXELS

_SIDE = 320


def explain_class(
    name: str,
    path: Path,
    decoders: Decoders,
    *,
    weights: str,
    size: int,
    device: torch.device,
    classes: Sequence[int] | None = None,
    before: str = "",
) -> Findings:
    """Show what a classifier sees in an image.

    Args:
        name: of the network.
        path: the image.
        decoders: one process is enough.
        weights: `imagenet`, `random`, or a file.
        size: images are brought to the area of a square of this side.
        device: where to compute.
        classes: the indices of those to look for; by default the likeliest, at most three.
        before: what the names of the feature maps' pictures begin with.

    Returns:
        Feature maps of each stage, Grad-CAM and its guided form.

    Raises:
        ImageError: the image can't be used.
        AnomalyError: there is no such network, class or weights file.
    """
    table = layer_table(build(name), size)
    multiple = side_multiple(build(name))
    sizing = Sizing(size if multiple is None else None, None, size, multiple or 32)
    loading = Preprocessing(sizing, None, MAX_PIXELS)
    item = read_one(path, loading, decoders)
    network = full_network(name, weights).requires_grad_(False).to(device)
    pixels = torch.from_numpy(item.pixels).permute(2, 0, 1).to(device)
    image = normalisation(name)(pixels)
    shown = Findings()
    if not (mapped := stages(table)):
        raise AnomalyError(f"{name} makes no feature maps of {size} × {size} pixels; use more")
    seen = picture_of(item)
    shown.draw_maps(network, image, mapped, seen, before)

    with torch.inference_mode():
        chances = network(image[None])[0].softmax(dim=0)
    likeliest = chances.argsort(descending=True)[:3].tolist()
    classes = classes or [c for c in likeliest if chances[c] > 0.05] or likeliest[:1]
    _check_classes(classes, len(chances), name)
    labels = {c: f"{_class_name(name, c)}, {float(chances[c]):.0%}" for c in classes}
    shown.facts["classes"] = [
        {"index": c, "name": _class_name(name, c), "probability": float(chances[c])}
        for c in classes
    ]
    layer = last_map(table) or token_layer(table)
    if layer is None:
        shown.notes.append(f"Grad-CAM: {name} puts out neither a late feature map nor tokens")
        return shown
    if not _can_be_guided(network):
        shown.notes.append(f"guided Grad-CAM: {name} has no ReLU layers")
    shown.pictures["grad_cam.png"] = _class_evidence(network, image, seen, layer, labels)
    return shown


def _check_classes(classes: Sequence[int], count: int, name: str) -> None:
    for target in classes:
        if not 0 <= target < count:
            raise AnomalyError(f"--class {target}: {name} has classes 0 to {count - 1}")


def _class_name(network: str, index: int) -> str:
    names = backbone_of(network).classes()
    return str(names[index]) if index < len(names) else f"class {index}"


def _can_be_guided(model: nn.Module) -> bool:
    """Whether guided backpropagation is defined: the network has ReLU layers."""
    return any(isinstance(module, nn.ReLU | nn.ReLU6) for module in model.modules())


def _class_evidence(
    model: nn.Module, image: Tensor, picture: RgbImage, layer: str, classes: Mapping[int, str]
) -> RgbImage:
    """A line for each class: the image, Grad-CAM and, where the network allows it, its guided form.

    Args:
        model: a classifier in eval mode.
        image: (3, H, W), normalised as the network wants it, on the network's device.
        picture: the image as a screen shows it, (H, W, 3) uint8 RGB.
        layer: where Grad-CAM looks, see `grad_cam`.
        classes: index to caption.

    Returns:
        (H', W', 3) RGB.
    """
    seen = marked(picture, [], _SIDE)
    guided = _can_be_guided(model)
    lines = []
    for target, caption in classes.items():
        cam = grad_cam(model, image, layer, target)
        panels = [(caption, seen), (f"Grad-CAM at {layer}", glowing(seen, cam))]
        if guided:
            details = signed(guided_grad_cam(model, image, layer, target))
            panels.append(("guided Grad-CAM", marked(details, [], _SIDE)))
        lines.append(beside(panels))
    return stacked(lines)
