"""What a folder of an exported model says of itself: export.json, and which files belong to it.

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

from anomaly.backbones.engine import ENGINES, ExportedNetwork, Graph, has_no_layers
from anomaly.config.schema import Config
from anomaly.errors import ModelError
from anomaly.files.writing import as_json
from anomaly.runtime.devices import CPU
from anomaly.runtime.parallel import get_threads
from anomaly.scoring.build import array_scorer_of
from anomaly.storage.folder import (
    AGAIN,
    BACKBONE,
    EXPORT,
    MANIFEST,
    SCORER,
    Part,
    Recorded,
    checked,
    find_model,
    model_id,
    read_sealed,
    read_tensors,
    sealed,
)

FORMAT = "anomaly-export/2"


class _Tensor(Part):
    name: str
    type: str
    shape: tuple[int | str, ...]
    meaning: str


class _Graph(Part):
    file: str
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]


class _Changed(Part):
    image: str
    before: str
    after: str
    scores: tuple[float, float]


class _OtherPrecision(Part):
    trained_in: Literal["fp32", "bf16"]
    median_difference: float
    largest_difference: float
    verdicts_changed: tuple[_Changed, ...]


class _Equality(Part):
    compared_with: str
    images: tuple[str, ...]
    tolerance: float
    largest_difference: float
    largest_difference_at: str
    largest_whole_difference: float | None


class _Export(Part):
    format: Literal["anomaly-export/2"]
    software_version: str
    model_id: str
    engine: Literal["onnx", "openvino"]
    engine_version: str
    opset: int
    precision: Literal["fp32", "bf16"]
    network: _Graph
    whole: _Graph | None
    equality: _Equality
    other_precision: _OtherPrecision | None
    files: dict[str, Recorded]


def read_export(folder: Path) -> dict[str, Any] | None:
    """What an exported model's folder says of itself; None for any other model folder.

    Raises:
        ModelError: it is damaged, was changed, was written by another version, or belongs to
            another model than the manifest beside it; or it is missing where there is a graph.
    """
    file = folder / EXPORT
    if not file.exists():
        if graphs := [name for name in _NETWORKS if (folder / name).exists()]:
            raise ModelError(
                f"{folder} holds {graphs[0]} of an exported model, but lacks {EXPORT}; {AGAIN}"
            )
        return None
    of_exports = ("of this version's exports", FORMAT)
    values = read_sealed(file, _Export, of_exports, "export the model again")
    if values["model_id"] != model_id(folder):
        raise ModelError(
            f"{folder} mixes files of two models: {EXPORT} belongs to another one than {MANIFEST}; "
            "copy the whole model folder again"
        )
    return values


def is_exported(folder: Path) -> bool:
    """Whether a model folder is an exported one, even if it isn't complete."""
    return any((folder / name).exists() for name in (EXPORT, *_NETWORKS))


def write_export(folder: Path, values: dict[str, Any]) -> None:
    """Write what an exported model's folder says of itself, sealed; all but `format`."""
    content = {"format": FORMAT, **values}
    checked(content, _Export, folder / EXPORT)
    (folder / EXPORT).write_text(as_json(sealed(content)), "utf-8")


def check_layers(folder: Path) -> None:
    """Refuse an exported model, which has no layers.

    Args:
        folder: the run, or its model folder.

    Raises:
        ModelError: there is no model, or it is an exported one.
    """
    if ((model := find_model(folder)) / EXPORT).exists():
        raise has_no_layers(model)


def files_of(manifest: dict[str, Any], export: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the files that belong to a model, by name."""
    files: dict[str, dict[str, Any]] = dict(manifest["files"])
    if export is not None:
        del files[BACKBONE]
        files |= export["files"]
    return files


def open_network(
    folder: Path, manifest: Mapping[str, Any], export: Mapping[str, Any]
) -> ExportedNetwork:
    """The exported network, ready to run.

    Raises:
        ModelError: its engine isn't installed, can't read the graph, or lacks the precision.
    """
    backbone = manifest["backbone"]
    file = folder / export["network"]["file"]
    graph = Graph(file, export["engine"], export["precision"], get_threads())
    layers, channels, strides = (tuple(backbone[key]) for key in ("layers", "channels", "strides"))
    return ExportedNetwork(graph, layers, channels, strides, backbone.get("patch"))


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


_NETWORKS = [graph_names(engine, "network")[0] for engine in ENGINES]
