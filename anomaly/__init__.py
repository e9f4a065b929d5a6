"""Visual inspection that learns what good looks like and marks what isn't.

The public names are imported when they are first used, so that what decodes images stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anomaly.errors import needs_training

__version__ = "0.1.0"

if TYPE_CHECKING:
    from anomaly.config.files import load_config
    from anomaly.config.schema import Config
    from anomaly.datasets import open_dataset
    from anomaly.errors import AnomalyError, ImageError
    from anomaly.evaluation.recalibration import recalibrated as recalibrated
    from anomaly.evaluation.updating import updated as updated
    from anomaly.explain.score import explained as explained
    from anomaly.model.detector import AnomalyDetector
    from anomaly.model.fitting import fit
    from anomaly.model.prediction import Prediction
    from anomaly.model.product_folder import load
    from anomaly.report.category import evaluate

_HOME = {
    "AnomalyDetector": "model.detector",
    "AnomalyError": "errors",
    "Config": "config.schema",
    "ImageError": "errors",
    "Prediction": "model.prediction",
    "evaluate": "report.category",
    "fit": "model.fitting",
    "load": "model.product_folder",
    "load_config": "config.files",
    "open_dataset": "datasets",
}
# What methods of public objects do on floors above their own.
_ABOVE = {
    "explained": "explain.score",
    "recalibrated": "evaluation.recalibration",
    "updated": "evaluation.updating",
}

__all__ = [
    "AnomalyDetector",
    "AnomalyError",
    "Config",
    "ImageError",
    "Prediction",
    "evaluate",
    "fit",
    "load",
    "load_config",
    "open_dataset",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or _ABOVE.get(name)
    if home is None:
        raise AttributeError(f"module 'anomaly' has no attribute {name!r}")
    try:
        return getattr(import_module(f"anomaly.{home}"), name)
    except ModuleNotFoundError as error:
        raise needs_training(f"anomaly.{name}", error) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
