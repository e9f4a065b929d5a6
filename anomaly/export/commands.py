"""`anomaly export` and `features`: models and features for other programs."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anomaly.backbones.engine import ENGINES
from anomaly.backbones.weights import check_weights
from anomaly.cli.common_options import chosen_device
from anomaly.cli.logging_setup import ProgressLine
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, ConfigError, counted
from anomaly.export.models import ExportOptions, check_export, export_model
from anomaly.files.outputs import locked, locked_file
from anomaly.files.writing import claim
from anomaly.storage.folder import find_model

log = logging.getLogger(__name__)


def _export(options: argparse.Namespace) -> int:
    """Export a model, or report how the export differs."""
    if options.pixels and not options.whole:
        raise ConfigError("--pixels is for the whole graph; add --whole")
    wanted = ExportOptions(
        options.to,
        whole=options.whole,
        camera=options.pixels,
        golden=options.golden,
        overwrite=options.overwrite,
    )
    check_export(options.model, options.output, wanted)  # before torch is imported
    with locked(options.output):
        options.device = "cpu"
        chosen_device(options)
        with ProgressLine() as progress:
            exported = export_model(options.model, options.output, wanted, progress=progress)
    _print_export(exported, options.output / "model")
    return 0


def _print_export(values: dict[str, Any], folder: Path) -> None:
    """Print the facts of export.json."""
    equal = values["equality"]
    engine = f"{ENGINES[values['engine']][0]} {values['engine_version']}"
    print(f"exported model {values['model_id']} for {engine}: {folder}")
    print(
        f"compared with {equal['compared_with']}, on "
        f"{counted(len(equal['images']), 'golden image')}: same verdicts; scores differ by "
        f"{equal['largest_difference']:.1g} of their value at most"
    )
    print(
        f"Use it: anomaly infer --model {shlex.quote(str(folder.parent))} --input FOLDER --output "
        "FOLDER"
    )


def _features(options: argparse.Namespace) -> int:
    """Save features."""
    if "" in (options.layers or ()):
        raise AnomalyError("--layers has an empty name; name layers, such as layer3")
    if options.model is None:
        options.weights = options.weights or "imagenet"
        check_weights(options.weights)
    else:
        for name in ("layers", "weights"):
            if getattr(options, name):
                raise AnomalyError(f"--{name} needs --backbone; a model already has it")
        find_model(options.model, exported=False)
    if options.output.suffix != ".npz":
        raise AnomalyError(f"--output {options.output} must end in .npz")
    paths = find_inputs(options.input).paths
    with locked_file(options.output):
        claim(options.output.parent, [options.output.name], overwrite=options.overwrite)
        return _save_features(options, paths)


def _save_features(options: argparse.Namespace, paths: Sequence[Path]) -> int:
    # Importing torch takes seconds, so options are checked before.
    from anomaly.export.features import from_backbone, from_model, save_features

    device = chosen_device(options)
    if options.model is None:
        source = from_backbone(options.backbone, options.weights, device, options.layers)
    else:
        source = from_model(options.model, device)
    with ProgressLine() as progress:
        refused = save_features(
            source,
            paths,
            options.output,
            pool=options.pool,
            progress=progress,
        )
    for each in refused:
        log.warning("left out: %s", each.reason)
    saved = counted(len(paths) - len(refused), "image")
    print(f"{saved} saved in {options.output}; layers: {', '.join(source.layers)}")
    return 3 if refused else 0


COMMANDS = {
    "export": _export,
    "features": _features,
}
