"""The manifest of a model folder: what it says, in which form, and that it vouches for itself.

`manifest.json` holds the sha256 of each other file, and `manifest_sha256`, that of its own text
without this entry. A model without it, as the first format was, still loads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from anomaly.errors import ModelError
from anomaly.files.writing import as_json
from anomaly.methods.base import ArrayScorer
from anomaly.scoring.image_statistics import TrainingStatistics

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = "anomaly-model/2"
_UNSEALED = "anomaly-model/1"
_SEAL = "manifest_sha256"
AGAIN = "copy the model folder again, or train again"

_T = TypeVar("_T")
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Index = Annotated[int, Field(ge=0, lt=2**63)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_ModelId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Mean = Annotated[float, Field(ge=0, le=1)]  # of values in [0, 1]
_ABSENT: Any = None  # what not every model has; where it is named, it isn't null
_Deviation = Annotated[float, Field(ge=1e-3, le=1)]


class Part(BaseModel):
    """A piece of a JSON file of which all entries are known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Backbone(Part):
    name: str
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    channels: tuple[_Count, ...]
    strides: tuple[_Count, ...]
    mean: tuple[_Mean, _Mean, _Mean]
    std: tuple[_Deviation, _Deviation, _Deviation]
    weights: str
    weights_sha256: _Sha256 | None
    weights_licence: str = _ABSENT
    patch: _Count = _ABSENT


class _MadeWith(Part):
    packages: dict[str, str | None]
    python: str
    machine: str
    device: str
    threads: _Count
    batch_size: _Count
    precision: Literal["fp32", "bf16"]
    shard_images: _Count = _ABSENT  # trained on a cluster, by shards of so many


class Recorded(Part):
    """What is recorded of a file."""

    bytes: _Index
    sha256: _Sha256


class _Files(Part):
    backbone: Recorded = Field(alias="backbone.safetensors")
    scorer: Recorded = Field(alias="scorer.safetensors")
    config: Recorded = Field(alias="config.yaml")
    thresholds: Recorded = Field(alias="thresholds.json")
    calibration: Recorded = Field(alias="calibration.json")
    usual: Recorded = Field(alias="usual.safetensors", default=_ABSENT)
    region: Recorded = Field(alias="region.png", default=_ABSENT)
    ignore: Recorded = Field(alias="ignore.png", default=_ABSENT)


class _Manifest(Part):
    format: Literal["anomaly-model/1", "anomaly-model/2"]
    software_version: str
    name: str
    seed: _Index
    aspect: Annotated[float, Field(ge=1e-4, le=1e4)] | None
    backbone: _Backbone
    made_with: _MadeWith
    files: _Files
    training_images: Annotated[dict[str, _Sha256], Field(min_length=1)]
    refused_images: dict[str, _Index]
    parents: Annotated[list[_ModelId], Field(min_length=1)] = _ABSENT


def read_json(file: Path) -> Any:
    """The values in a JSON file of a model folder, numbers all finite.

    Raises:
        ModelError: it can't be read, or isn't JSON.
    """
    try:
        return json.loads(file.read_text("utf-8"), parse_constant=_infinite, parse_float=_finite)
    except OSError as error:
        raise ModelError(f"{file} can't be read ({error.strerror}); {AGAIN}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{file} isn't JSON as this program writes it; {AGAIN}") from None


def checked(values: Any, kind: type[_T], file: Path) -> _T:
    """JSON values as a dataclass or a model of their schema.

    Bytes of file names that aren't UTF-8, which pydantic takes for no text, become `?`.

    Raises:
        ModelError: something in them is missing, unknown, or of another type or range.
    """
    text = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        wrong = {
            "missing": "is missing",
            "extra_forbidden": "isn't known to this version",
        }.get(first["type"], f"can't be {str(first['input'])[:40]}")
        raise ModelError(f"{file}: {where} {wrong}; {AGAIN}") from None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a model folder says about itself, without reading or checking its other files.

    Args:
        folder: the model folder.

    Raises:
        ModelError: it is damaged, was changed, or was made by something else.
    """
    file = folder / MANIFEST
    values = read_json(file)
    if not isinstance(values, dict) or values.get("format") not in (FORMAT, _UNSEALED):
        found = values.get("format") if isinstance(values, dict) else None
        raise ModelError(
            f"{file} isn't a manifest of this program's models (format {str(found)[:40]!r}, "
            f"expected {FORMAT!r}); give a folder that this version's `train` wrote"
        )
    if values["format"] == _UNSEALED:
        log.warning(
            "%s is of the first format, which doesn't show whether it was changed; train again, "
            "or set thresholds with `anomaly calibrate`, to have one that does",
            file,
        )
    else:
        if not is_sealed(values, file):
            raise ModelError(f"{file} was changed since it was written; {AGAIN}")
    checked(values, _Manifest, file)
    return values


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Write what a model folder says about itself, sealed.

    Args:
        folder: the model folder.
        values: all but `format` and the seal.
    """
    content = as_json(sealed({"format": FORMAT} | values | {"format": FORMAT}))
    (folder / MANIFEST).write_text(content, "utf-8")


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Values with the hash of their own text."""
    return values | {_SEAL: _hash(values)}


def is_sealed(values: dict[str, Any], file: Path) -> bool:
    """Whether a file holds these values as they were written; takes the hash out of them."""
    seal = values.pop(_SEAL, None)
    return seal == _hash(values) and file.read_bytes() == as_json(sealed(values)).encode()


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(as_json(values).encode()).hexdigest()


def _infinite(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def agree(folder: Path, what: str, manifest: object, found: object) -> None:
    """See that a manifest and the files beside it say the same.

    Raises:
        ModelError: they don't.
    """
    if manifest != found:
        raise ModelError(
            f"{folder}: {what} is {manifest!r} in its manifest, and {found!r} in its other files; "
            f"{AGAIN}"
        )


def check_together(
    folder: Path,
    manifest: dict[str, Any],
    scorer: ArrayScorer,
    training_statistics: TrainingStatistics | None,
) -> None:
    """See that the scorer is one for the network's embeddings and the manifest's images.

    Raises:
        ModelError: it isn't.
    """
    images = len(manifest["training_images"]) + len(manifest["refused_images"])
    try:
        scorer.check_origin(sum(manifest["backbone"]["channels"]), images)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}; {AGAIN}") from None
    if training_statistics is not None:
        agree(folder, "channels", scorer.dimensions, len(training_statistics.mean))
