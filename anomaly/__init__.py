"""Visual inspection that learns what good looks like and marks what isn't.

The public names are imported when they are first used, so that what decodes images stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anomaly.errors import needs_training

if TYPE_CHECKING:
    from anomaly.config.load import load_config
    from anomaly.config.schema import Config
    from anomaly.datasets.layouts import open_dataset
    from anomaly.desk.tune import tune
    from anomaly.detector import Detector, fit, load
    from anomaly.errors import AnomalyError, ImageError
    from anomaly.imaging.arrays import image
    from anomaly.runtime import __version__ as __version__
    from anomaly.scoring.prediction import Prediction

_HOME = {
    "__version__": "runtime",
    "Detector": "detector",
    "AnomalyError": "errors",
    "Config": "config.schema",
    "ImageError": "errors",
    "Prediction": "scoring.prediction",
    "fit": "detector",
    "image": "imaging.arrays",
    "load": "detector",
    "load_config": "config.load",
    "open_dataset": "datasets.layouts",
    "tune": "desk.tune",
}

__all__ = [
    "AnomalyError",
    "Config",
    "Detector",
    "ImageError",
    "Prediction",
    "fit",
    "image",
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
