"""A model folder as an MLflow model: logged with its files as they are, loaded without pickle."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from anomaly.errors import OutputError
from anomaly.imaging.array_input import ImageLike, is_one
from anomaly.inference.rows import Row, row_of
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import EXPORT, find_model
from anomaly.storage.load import load_model
from anomaly.version import __version__

if TYPE_CHECKING:
    import pandas as pd

_COLUMN = "path"


def register(folder: Path, name: str | None = None, store: str | None = None) -> str:
    """Log a model folder in a run of MLflow, and register it.

    Args:
        folder: the model folder, or the run that holds it as `model/`.
        name: of the registered model, whose next version this becomes; by default the config's.
        store: the tracking server's address or a folder's; by default MLflow's own choice, which
            MLFLOW_TRACKING_URI sets.

    Returns:
        The address under which MLflow loads it.

    Raises:
        ModelError: no whole model is there.
        OutputError: MLflow can't keep it there.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow
    from mlflow.exceptions import MlflowException

    model, folder = load_model(folder, "cpu"), find_model(folder)
    engine = model.extractor.engine if (folder / EXPORT).exists() else "train"
    name = name or model.config.name
    if store is not None:
        mlflow.set_tracking_uri(store)
    try:
        with mlflow.start_run(run_name=model.model_id):
            mlflow.log_params(_facts(model))
            logged = mlflow.pyfunc.log_model(
                name="model",
                loader_module=__name__,
                data_path=str(folder),
                registered_model_name=name,
                pip_requirements=[f"anomaly[{engine},mlflow]=={__version__}"],
                await_registration_for=0,
            )
    except (MlflowException, OSError) as error:
        place = urlsplit(mlflow.get_tracking_uri())
        shown = place._replace(netloc=place.netloc.rpartition("@")[2]).geturl()
        code = str(getattr(error, "error_code", "")).replace("_", " ").lower()
        raise OutputError(
            f"MLflow can't keep the model at {shown} ({code or 'it is not reached'})"
        ) from None
    return f"models:/{name}/{logged.registered_model_version}"


def _facts(model: Model) -> dict[str, Any]:
    """A model's facts for MLflow's list of runs."""
    limits = model.thresholds
    return {
        "model_id": model.model_id,
        "model_name": model.config.name,
        "method": model.method,
        "backbone": model.config.backbone.name,
        "training_images": len(model.manifest.get("training_images", ())),
        "reject_threshold": "" if limits is None else limits.image,
        "review_threshold": "" if limits is None else limits.review,
        "engine": model.extractor.engine,
        "software_version": __version__,
    }


def _load_pyfunc(folder: str) -> ScoringModel:
    """Load a model; MLflow calls this by its name with the model folder."""
    return ScoringModel(load_model(folder))


class ScoringModel:
    """The model that `mlflow.pyfunc.load_model` wraps."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def predict(self, images: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Score images.

        Args:
            images: a path, an array (H, W), (H, W, 3) or (N, H, W, 3), a list of paths and arrays,
                or a table whose column `path`, else the first, holds paths.
            params: ignored.

        Returns:
            The columns of results.csv, a row for each image in their order; an unusable image's
            row gives the reason.
        """
        import pandas as pd

        begun, given = time.perf_counter(), _listed(images)
        results = {one.index: one for one in self._model.results(given)}
        names = [str(i) if isinstance(i, str | os.PathLike) else "" for i in given]
        rows = (row_of(results[i], self._model, name, begun) for i, name in enumerate(names))
        return pd.DataFrame([asdict(row) for row in rows], columns=[f.name for f in fields(Row)])


def _listed(images: Any) -> list[ImageLike]:
    if hasattr(images, "columns"):
        images = images[_COLUMN if _COLUMN in images.columns else images.columns[0]]
    if isinstance(images, np.ndarray) and images.dtype.kind in "OU":
        images = images.ravel().tolist()
    return [images] if is_one(images) else list(images)
