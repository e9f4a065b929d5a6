"""Visual inspection that learns what good looks like and marks what isn't.

The public names are imported when they are first used, so that what decodes images stays small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anomaly.errors import needs_training

if TYPE_CHECKING:  # an `as` marks a public name for type checkers
    from anomaly.config.load import load_config as load_config
    from anomaly.config.schema import Config as Config
    from anomaly.datasets.layouts import open_dataset as open_dataset
    from anomaly.desk.tune import tune as tune
    from anomaly.detector import Detector as Detector
    from anomaly.detector import fit as fit
    from anomaly.detector import load as load
    from anomaly.errors import AnomalyError as AnomalyError
    from anomaly.errors import ImageError as ImageError
    from anomaly.imaging.arrays import image as image
    from anomaly.runtime import __version__ as __version__
    from anomaly.scoring.model import Prediction as Prediction

# The module below `anomaly` that has each public name.
_HOME = {
    "AnomalyError": "errors",
    "Config": "config.schema",
    "Detector": "detector",
    "ImageError": "errors",
    "Prediction": "scoring.model",
    "fit": "detector",
    "image": "imaging.arrays",
    "load": "detector",
    "load_config": "config.load",
    "open_dataset": "datasets.layouts",
    "tune": "desk.tune",
}
__all__ = list(_HOME)
_HOME["__version__"] = "runtime"


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
