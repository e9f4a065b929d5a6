"""Examples in the service's OpenAPI description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_ROW = {
    "path": "part-0731.png",
    "image_sha256": "9f2c6b0c8f6d4f6a3d6f2a1d6c5b4a39281706f5e4d3c2b1a09f8e7d6c5b4a39",
    "status": "ok",
    "image_score": 3.412,
    "calibrated_score": 2.6,
    "review_threshold": 2.31,
    "threshold": 2.75,
    "verdict": "reject",
    "heatmap": "",
    "model_id": "5d1f0c2b7a9e8c64",
    "software_version": "0.1.0",
    "threshold_label": "calibrated",
    "reason": "",
    "model_name": "plate",
    "time": "2026-05-04T09:41:07.312+00:00",
    "milliseconds": 61.4,
    "engine": "torch",
    "product": "",
    "id": 731,
}
_NO_SCORE = {
    "image_sha256": "",
    "status": "unreadable",
    "image_score": None,
    "calibrated_score": None,
    "verdict": "",
    "reason": "its data ends too early",
    "id": 732,
}
_MODEL = {
    "name": "plate",
    "state": "ready",
    "refused": False,
    "reason": "",
    "model_id": "5d1f0c2b7a9e8c64",
    "model_name": "plate",
    "method": "PatchCore",
    "unit": "distance to the nearest good patch",
}


def _json(description: str, example: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"example": example}}}


_FILE = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "properties": {"image": _FILE}, "required": ["image"]}
SCORE_BODY: dict[str, Any] = {
    "description": "an image file: PNG, JPEG, TIFF, BMP or WebP, told apart by content",
    "required": True,
    "content": {
        "application/octet-stream": {"schema": _FILE},
        "multipart/form-data": {"schema": _FORM},
    },
}
_REGION = {
    "path": "part-0731.png",
    "region": 1,
    "x": 311,
    "y": 402,
    "width": 44,
    "height": 37,
    "area": 1103,
    "peak_score": 3.41,
    "peak_x": 330,
    "peak_y": 417,
    "width_uncertainty": 15.63,
    "height_uncertainty": 15.63,
    "width_mm": None,
    "height_mm": None,
    "area_mm2": None,
    "width_uncertainty_mm": None,
    "height_uncertainty_mm": None,
}
SCORED = _json("A row of results.jsonl, and what was asked for", {**_ROW, "regions": [_REGION]})
REFUSED = _json("The image can't be used: status and reason say why", {**_ROW, **_NO_SCORE})
LISTED = _json("All models", {"models": [_MODEL]})
SERVED = _json(
    "One model",
    {
        **_MODEL,
        "checked": "every file's hash, and 12 golden parts, which score as recorded",
        "drift": {"alarm": False, "lines": []},
        "config": {"name": "plate", "backbone": {"name": "wide_resnet50_2"}},
        "thresholds": {"label": "calibrated", "reject": {"value": 2.75}, "pixel": 2.75},
        "calibration": ["thresholds calibrated on 209 training images"],
        "training_images": 209,
    },
)


def described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description, with what is null in an example, which FastAPI leaves out."""
    if app.openapi_schema is None:
        description = FastAPI.openapi(app)
        score = description["paths"]["/v1/models/{name}/score"]["post"]["responses"]
        score["200"], score["422"] = SCORED, REFUSED
    return app.openapi_schema or description
