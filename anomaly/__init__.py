"""Visual inspection that learns what good looks like and marks what isn't.

The public names are imported when they are first used, so that what decodes images stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from anomaly.config.files import load_config
    from anomaly.config.schema import Config
    from anomaly.datasets import open_dataset
    from anomaly.errors import AnomalyError
    from anomaly.evaluation.evaluate import evaluate
    from anomaly.model.checkpoint import load, save
    from anomaly.model.detector import AnomalyDetector
    from anomaly.model.prediction import Prediction
    from anomaly.model.training import fit

_HOME = {
    "AnomalyDetector": "model.detector",
    "AnomalyError": "errors",
    "Config": "config.schema",
    "Prediction": "model.prediction",
    "evaluate": "evaluation.evaluate",
    "fit": "model.training",
    "load": "model.checkpoint",
    "load_config": "config.files",
    "open_dataset": "datasets",
    "save": "model.checkpoint",
}

__all__ = [
    "AnomalyDetector",
    "AnomalyError",
    "Config",
    "Prediction",
    "evaluate",
    "fit",
    "load",
    "load_config",
    "open_dataset",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'anomaly' has no attribute {name!r}")
    return getattr(import_module(f"anomaly.{_HOME[name]}"), name)
