"""Exported models: their export.json, and which files belong to one.

    export/
      network.onnx           or network.xml and network.bin: images -> patch embeddings
      whole.onnx             images -> patch scores; only with --whole
      export.json            engine, inputs, outputs, differences on golden images; sha256 of these
                             files
      …                      all files of the model folder but backbone.safetensors, unchanged

The manifest is the model's, and so is its id: it is the same model, computed by another engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from anomaly.backbones.engine import ENGINES, ExportedNetwork, Graph
from anomaly.config.schema import Config
from anomaly.errors import ModelError
from anomaly.runtime import CPU, get_threads
from anomaly.scoring.build import array_scorer_of
from anomaly.storage.folder import (
    BACKBONE,
    EXPORT,
    MANIFEST,
    SCORER,
    Recorded,
    check_files,
    model_id,
    read_manifest,
    read_sealed,
    read_tensors,
    write_sealed,
)

FORMAT = "anomaly-export/3"


class _Facts(BaseModel):
    """Entries of an exported model's file; others are for people."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Network(_Facts):
    file: str


class _Export(_Facts):
    model_id: str
    engine: Literal["onnx", "openvino"]
    network: _Network
    files: dict[str, Recorded]


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The manifest of a model folder and the export.json of an exported model, its files checked.

    Raises:
        ModelError: a file is missing, damaged, was changed, was written by another version, or
            doesn't belong.
    """
    manifest, export = read_manifest(folder), _read_export(folder)
    files = dict(manifest["files"])
    if export is not None:
        files.pop(BACKBONE, None)
        files |= export["files"]
    check_files(folder, files)
    return manifest, export


def _read_export(folder: Path) -> dict[str, Any] | None:
    file = folder / EXPORT
    if not file.exists():
        return None
    values = read_sealed(file, _Export, FORMAT, "export the model again")
    if values["model_id"] != model_id(folder):
        raise ModelError(
            f"{folder} mixes files of two models: {EXPORT} belongs to another one than {MANIFEST}; "
            "copy the whole model folder again"
        )
    return values


def write_export(folder: Path, values: dict[str, Any]) -> None:
    """Write the export.json of an exported model, sealed; `values` are all but `format`."""
    write_sealed(folder / EXPORT, FORMAT, values)


def open_network(
    folder: Path, manifest: Mapping[str, Any], export: Mapping[str, Any]
) -> ExportedNetwork:
    """The exported network, ready to run.

    Raises:
        ModelError: its engine isn't installed, or can't read the graph.
    """
    backbone = manifest["backbone"]
    file = folder / export["network"]["file"]
    graph = Graph(file, export["engine"], get_threads())
    layers, channels, strides = (tuple(backbone[key]) for key in ("layers", "channels", "strides"))
    patches = (
        stride for axes, stride in zip(backbone["axes"], strides, strict=True) if axes == "tokens"
    )
    return ExportedNetwork(graph, layers, channels, strides, next(patches, None))


def exported_stages(network: ExportedNetwork, folder: Path, config: Config) -> dict[str, Any]:
    """What stands in for a detector's stages in torch, by the names that these have there.

    Raises:
        ModelError: the scorer in the folder is damaged, or the method has none without torch.
    """
    return {
        "extractor": network,
        "normalise": None,  # the graph does
        "scorer": array_scorer_of(config, read_tensors(folder / SCORER)),
        "device": CPU,
    }


def graph_names(engine: str, stem: str) -> tuple[str, ...]:
    """The files that an engine's graph consists of; the first is the one to load."""
    ending = ENGINES[engine][2]
    return (f"{stem}.xml", f"{stem}.bin") if ending == ".xml" else (f"{stem}{ending}",)
