"""Visual inspection that learns what good looks like and marks what isn't.

The public names are imported when they are first used, so that what decodes images stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anomaly.errors import needs_training
from anomaly.version import __version__ as __version__

if TYPE_CHECKING:
    from anomaly.config.load import load_config
    from anomaly.config.schema import Config
    from anomaly.datasets import open_dataset
    from anomaly.detector import AnomalyDetector, load
    from anomaly.errors import AnomalyError, ImageError
    from anomaly.evaluating import evaluate
    from anomaly.fitting import fit
    from anomaly.scoring.prediction import Prediction
    from anomaly.training.tuning.tune import tune

_HOME = {
    "AnomalyDetector": "detector",
    "AnomalyError": "errors",
    "Config": "config.schema",
    "ImageError": "errors",
    "Prediction": "scoring.prediction",
    "evaluate": "evaluating",
    "fit": "fitting",
    "load": "detector",
    "load_config": "config.load",
    "open_dataset": "datasets",
    "tune": "training.tuning.tune",
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
    "tune",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'anomaly' has no attribute {name!r}")
    try:
        return getattr(import_module(f"anomaly.{home}"), name)
    except ModuleNotFoundError as error:
        raise needs_training(f"anomaly.{name}", error) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
