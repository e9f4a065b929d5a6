"""`anomaly explain`: why an image was flagged, and what a classifier looks at, in pictures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli import machine
from anomaly.errors import AnomalyError, ImageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from anomaly.explain.tiles import Picture
    from anomaly.imaging.decoder_pool import Decoders
    from anomaly.imaging.preprocessing import Loaded, Loading

OUTPUTS = ("explanation.json", "evidence.png", "score_gradient.png", "grad_cam.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", type=Path, help="a run, or its model/ folder: explains its anomaly score"
    )
    parser.add_argument(
        "--backbone", metavar="NAME", help="a torchvision classifier: explains the class it sees"
    )
    parser.add_argument("--input", type=Path, required=True, metavar="IMAGE", help="one image file")
    parser.add_argument("--output", type=Path, required=True, help="where the pictures go")
    parser.add_argument(
        "--good",
        type=Path,
        metavar="FOLDER",
        help="of --model: its training images, where they have moved since",
    )
    parser.add_argument(
        "--weights",
        default="imagenet",
        help="of --backbone: imagenet (default), random, or a .safetensors or .pth file",
    )
    parser.add_argument(
        "--input-size", type=int, default=224, metavar="N", help="of --backbone (default: 224)"
    )
    parser.add_argument(
        "--class",
        dest="classes",
        type=int,
        nargs="+",
        metavar="INDEX",
        help="of --backbone: the classes to look for (default: the likeliest, at most three)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace earlier pictures there")
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Draw everything that can be shown about one image."""
    from anomaly.files.output_lock import locked

    if options.model is None and options.backbone is None:
        raise AnomalyError("give --model, --backbone, or both")
    if not options.input.is_file():
        raise AnomalyError(f"--input {options.input} isn't a file; explain takes one image")
    with locked(options.output):
        return _explain(options)


def _explain(options: argparse.Namespace) -> int:
    from anomaly.files.writing import as_json, claim, write
    from anomaly.imaging.decoder_pool import Decoders
    from anomaly.maps.heatmap import encode_png

    device, _ = machine.settle(options)
    ours = (f"{before}feature_maps_*.png" for before in ("", "classifier_"))
    earlier = [file.name for pattern in ours for file in options.output.glob(pattern)]
    claim(options.output, (*OUTPUTS, *earlier), overwrite=options.overwrite)
    shown = _Shown({"image": str(options.input)}, {}, [])
    with Decoders(1) as decoders:
        if options.model is not None:
            _explain_score(options, device, decoders, shown)
        if options.backbone is not None:
            _explain_class(options, device, decoders, shown)
    for name, picture in shown.pictures.items():
        write(options.output / name, encode_png(picture))
    facts = shown.facts | {"pictures": list(shown.pictures), "not_shown": shown.notes}
    write(options.output / "explanation.json", as_json(facts))
    if shown.facts.get("verdict"):
        reason = f": {shown.facts['reason']}" if shown.facts["reason"] else ""
        print(f"{shown.facts['verdict']}, score {shown.facts['image_score']:.4g}{reason}")
    print(f"{', '.join(shown.pictures)} and explanation.json in {options.output}")
    for note in shown.notes:
        print(f"not shown: {note}")
    return 0


@dataclass(frozen=True)
class _Shown:
    """What there is to say and show, and what there isn't."""

    facts: dict[str, Any]
    pictures: dict[str, Picture]
    notes: list[str]


def _explain_score(
    options: argparse.Namespace, device: torch.device, decoders: Decoders, shown: _Shown
) -> None:
    """Feature maps of the hooked layers, the patches that were flagged, the score's gradient."""
    from anomaly.explain.score import explain_score, good_folders
    from anomaly.model.checkpoint import load

    detector = load(options.model, device)
    item = _read(options.input, detector.loading, decoders)
    folders = good_folders(detector, options.good)
    explanation = explain_score(detector, item, folders, decoders.load)
    shown.facts.update({"model_id": detector.model_id} | explanation.facts())
    shown.pictures.update({f"{k}.png": v for k, v in explanation.pictures.items()})
    shown.notes.extend(explanation.notes)


def _explain_class(
    options: argparse.Namespace, device: torch.device, decoders: Decoders, shown: _Shown
) -> None:
    """Feature maps of each stage, Grad-CAM and its guided form."""
    import numpy as np
    import torch

    from anomaly.explain.classes import can_be_guided, class_evidence
    from anomaly.features.backbones import build, normalisation, whole
    from anomaly.features.layer_table import last_map, layer_table, stages, takes_oblong
    from anomaly.imaging.geometry import Sizing
    from anomaly.imaging.image import MAX_PIXELS
    from anomaly.imaging.preprocessing import Loading

    name, size = options.backbone, options.input_size
    table = layer_table(build(name), size)
    side = None if takes_oblong(build(name)) else size
    loading = Loading(Sizing(side, None, size, 32), None, MAX_PIXELS)
    item = _read(options.input, loading, decoders)
    network = whole(name, options.weights).requires_grad_(False).to(device)
    pixels = torch.from_numpy(item.pixels).permute(2, 0, 1).to(device)
    image = normalisation(name)(pixels)
    # Beside a model's, whose layers may have the same names.
    before = "" if options.model is None else "classifier_"
    _draw_maps(network, image, stages(table), shown, before)

    with torch.inference_mode():
        chances = network(image[None])[0].softmax(dim=0)
    likeliest = chances.argsort(descending=True)[:3].tolist()
    classes = options.classes or [c for c in likeliest if chances[c] > 0.05] or likeliest[:1]
    _check_classes(classes, len(chances), name)
    labels = {c: f"{_class_name(name, c)}, {float(chances[c]):.0%}" for c in classes}
    shown.facts["classes"] = [
        {"index": c, "name": _class_name(name, c), "probability": float(chances[c])}
        for c in classes
    ]
    layer = last_map(table)
    if layer is None:
        shown.notes.append(f"Grad-CAM: {name} puts out no late feature map")
        return
    if not can_be_guided(network):
        shown.notes.append(f"guided Grad-CAM: {name} has no ReLU layers")
    seen = np.rint(item.pixels * 255).astype(np.uint8)
    shown.pictures["grad_cam.png"] = class_evidence(network, image, seen, layer, labels)


def _check_classes(classes: Sequence[int], count: int, name: str) -> None:
    for target in classes:
        if not 0 <= target < count:
            raise AnomalyError(f"--class {target}: {name} has classes 0 to {count - 1}")


def _class_name(network: str, index: int) -> str:
    from anomaly.features.backbones import official_weights

    official = official_weights(network)
    names = [] if official is None else official.meta["categories"]
    return str(names[index]) if index < len(names) else f"class {index}"


def _draw_maps(
    network: nn.Module, image: Tensor, layers: Sequence[str], shown: _Shown, before: str
) -> None:
    from anomaly.explain.feature_maps import feature_map_pictures

    for layer, picture in feature_map_pictures(network, image, layers).items():
        shown.pictures[f"{before}feature_maps_{layer}.png"] = picture


def _read(path: Path, loading: Loading, decoders: Decoders) -> Loaded:
    from anomaly.imaging.decoder_worker import Task
    from anomaly.imaging.preprocessing import Refused

    decoders.begin(Task(loading, whole=True))
    item = decoders.load(path)
    if isinstance(item, Refused):
        raise ImageError(item.reason, item.status)
    return item
