"""`anomaly register`: a trained or exported model as the next version of a model of MLflow."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from anomaly.errors import AnomalyError
from anomaly.export.mlflow_model import register


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, required=True, help="the run, or its model/ folder")
    parser.add_argument("--name", help="of the registered model (the name in the model's config)")
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="of MLflow's tracking server ($MLFLOW_TRACKING_URI)",
    )


def run(options: argparse.Namespace) -> int:
    """Log, register, and say how it is loaded."""
    missing = [name for name in ("mlflow", "pandas") if find_spec(name) is None]
    if missing:
        raise AnomalyError(
            f"register needs {', '.join(missing)}, which aren't installed: "
            "pip install 'anomaly[mlflow]'"
        )
    address = register(options.model, options.name, options.store)
    print(f"registered as {address}")
    print(f"load it: mlflow.pyfunc.load_model({address!r}).predict(['part.png'])")
    return 0
