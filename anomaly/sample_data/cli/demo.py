"""`anomaly demo`: everything once, on two generated products."""

from __future__ import annotations

import argparse
from pathlib import Path

from anomaly.cli import execute
from anomaly.cli.common_options import add_device, add_settings, passed_on

_PRODUCTS = {"plate": "brushed_plate", "fabric": "woven_fabric"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="for the models and their results"
    )
    add_settings(parser, "a setting to train with; may be repeated")
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Generate, train, infer, evaluate; what an earlier demo left behind is replaced."""
    output: Path = options.output
    data = Path("data/sample")
    runs = {name: str(output / name) for name in _PRODUCTS}
    settings, computes = passed_on(options)
    steps = [["sample-data", "--output", str(data)]]
    for name, product in _PRODUCTS.items():
        config = ["--config", f"sample_{product}.yaml", *settings]
        steps.append(["train", *config, "--output", runs[name], *computes])
    for name, product in _PRODUCTS.items():
        where = ["--input", str(data / product / "test"), "--output", f"{runs[name]}/results"]
        steps.append(["infer", "--model", runs[name], *where, *computes])
    evaluation = output / "evaluation"
    steps.append(["evaluate", "--model", *runs.values(), "--output", str(evaluation), *computes])
    for step in steps:
        if code := execute([*step, "--overwrite"]):
            return code
    results = f"{output}/{{{','.join(_PRODUCTS)}}}/results"
    print(f"\nLook at {(evaluation / 'index.html').absolute()},")
    print(f"the heatmaps in {results}/heatmaps, the verdicts in {results}/results.csv.")
    return 0
