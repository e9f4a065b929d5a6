"""`anomaly explain` and `anomaly layers`: the evidence for a verdict, and a network's layers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.config.schema import METHODS
from anomaly.desk.golden import keep_missed
from anomaly.errors import AnomalyError, ConfigError, DataError, some
from anomaly.explain.page import PAGE, claim_folder, next_steps
from anomaly.files.tables import text_table
from anomaly.files.writing import locked, short_name
from anomaly.storage.folder import find_model, read_manifest
from anomaly.storage.models import config_in, load_model

if TYPE_CHECKING:
    from anomaly.backbones.layers import Layer

log = logging.getLogger(__name__)

_COLUMNS = ("layer", "type", "output", "stride", "parameters", "compute", "runs", "hooked")


def run_explain(options: argparse.Namespace) -> int:
    """Write the page about one image, and its pictures; returns 0."""
    if not options.image.is_file():
        raise AnomalyError(f"{options.image} isn't a file; explain takes one image")
    find_model(options.model, exported=False)  # refuses exported models before torch is imported
    if options.output is None:
        options.output = Path("explained") / short_name(options.image.stem)
    with locked(options.output):
        return _explain(options)


def _explain(options: argparse.Namespace) -> int:
    """Write the evidence into --output; print the verdict and what to do next; returns 0."""
    from anomaly.explain.evidence import explained  # needs torch

    output: Path = options.output
    claim_folder(output, overwrite=options.overwrite)
    why = explained(load_model(options.model), options.image, *options.good)
    why.save(output, overwrite=options.overwrite)
    facts = why.facts()
    if facts["verdict"]:
        reason = f": {facts['reason']}" if facts["reason"] else ""
        print(f"{facts['verdict']}, score {facts['image_score']:.4g}{reason}")
    print(f"{', '.join(facts['pictures'])} and explanation.json in {output}")
    if why.missing:
        log.info(f"not found or changed: {some(why.missing)}; name their folder with --good")
    print(f"Look at {output / PAGE}")
    if options.keep:
        _keep(options.model, options.image, facts["verdict"])
    elif facts["verdict"] == "good":
        for text, command in next_steps(why):
            print(f"{text} {command}".rstrip())
    return 0


def _keep(model: Path, image: Path, verdict: str) -> None:
    """Make a defect that was called good a known defect of the run."""
    if verdict != "good":
        raise DataError(
            f"{image} wasn't kept: only a defect that the model calls good is a missed one, and "
            f"the verdict is {verdict or 'unknown without thresholds'}"
        )
    print(f"kept as {keep_missed(find_model(model), image.name, image.read_bytes())}")


def run_layers(options: argparse.Namespace) -> int:
    """Print the tree of a network's layers as a table; returns 0."""
    if options.input_size < 1:
        raise AnomalyError(f"--input-size is {options.input_size}; it must be 1 or more")
    name, hooked = options.backbone, dict[str, str]()
    if options.model is not None:
        folder = find_model(options.model)
        name = config_in(folder).backbone.name
        hooked = dict.fromkeys(read_manifest(folder)["backbone"]["layers"], "hooked")
    # Imported only now: torch takes seconds, and refusals don't need it.
    from anomaly.backbones.layers import default_layers, layer_table
    from anomaly.backbones.networks import build

    network = build(name)
    if options.model is None:
        with suppress(ConfigError):  # a network without defaults
            hooked = _hooked_by_default(default_layers(name, network, 3))
    table = layer_table(network, options.input_size)
    print("\n".join(text_table([_COLUMNS, *(_row(x, hooked) for x in table)], left=(0, 1, 2, 7))))
    print(_summary(name, options.input_size, table, hooked, options.model is not None))
    return 0


def _hooked_by_default(layers: Sequence[str]) -> dict[str, str]:
    """Methods that hook a layer by default, by the layer's path: `patchcore, padim`.

    Args:
        layers: paths of the ends of the network's first three stages.
    """
    hooked: dict[str, str] = {}
    for kind, method in METHODS.items():
        for layer in layers[-method.stages :]:
            hooked[layer] = f"{hooked[layer]}, {kind}" if layer in hooked else kind
    return hooked


def _row(layer: Layer, hooked: Mapping[str, str]) -> tuple[str, ...]:
    """A layer's cells in the table, in the order of `_COLUMNS`; the network has an empty path."""
    depth = layer.path.count(".") + 1 if layer.path else 0
    return (
        "  " * depth + (layer.path or "(network)"),
        layer.kind,
        "not run" if not layer.runs else "×".join(map(str, (layer.shape or ("-",))[1:])),
        "" if layer.stride is None else str(layer.stride),
        f"{layer.parameters:,}",
        f"{layer.share:.1%}" if layer.runs else "",
        str(layer.runs) if layer.runs > 1 else "",
        hooked.get(layer.path, ""),
    )


def _summary(
    name: str, size: int, table: list[Layer], hooked: Mapping[str, str], trained: bool
) -> str:
    """The last line: the network's size, and the share that a model of `hooked` layers computes.

    Args:
        name: the network's name.
        size: side of the square image, in pixels.
        table: the network itself, then its layers.
        hooked: notes on hooked layers, by their paths.
        trained: True if a trained model hooks them; else they are the defaults.
    """
    whole = table[0]  # the network itself
    text = (
        f"\n{name} at {size}×{size}: {whole.parameters / 1e6:.1f} million parameters, "
        f"{whole.multiply_adds / 1e9:.2f} billion multiply-adds"
    )
    ends = [layer for layer in table if layer.path in hooked and layer.runs]
    if not ends:
        return f"{text}. No default layers: name the ones that you want to hook"
    last = max(ends, key=lambda layer: layer.share)  # nothing behind it is computed
    who = "this model" if trained else "a model with default layers"
    return f"{text}; {who} stops after {last.path}, at {last.share:.1%} of them"
