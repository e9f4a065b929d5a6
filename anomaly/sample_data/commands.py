"""`anomaly demo`: two generated products, and everything once on these."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from anomaly.cli import execute
from anomaly.cli.common_options import passed_on
from anomaly.cli.logging_setup import ProgressLine
from anomaly.files.outputs import locked
from anomaly.sample_data import PRODUCTS, write_sample_data

_DATA = Path("data/sample")
# What the demo calls its runs.
_RUNS = {"plate": "brushed_plate", "fabric": "woven_fabric"}


def _demo(options: argparse.Namespace) -> int:
    """Generate, train, infer, evaluate; what an earlier demo left behind is replaced."""
    output: Path = options.output
    runs = {name: str(output / name) for name in _RUNS}
    settings, computes = passed_on(options)
    steps: list[list[str]] = []
    for name, product in _RUNS.items():
        config = ["--config", f"sample_{product}.yaml", *settings]
        steps.append(["train", *config, "--output", runs[name], *computes])
    for name, product in _RUNS.items():
        where = ["--input", str(_DATA / product / "test"), "--output", f"{runs[name]}/results"]
        steps.append(["infer", "--model", runs[name], *where, *computes])
    evaluation = output / "evaluation"
    steps.append(["evaluate", "--model", *runs.values(), "--output", str(evaluation), *computes])
    with locked(_DATA), ProgressLine() as progress:
        write_sample_data(_DATA, overwrite=True, progress=partial(progress, "images"))
    print(f"{', '.join(PRODUCTS)} in {_DATA}")
    for step in steps:
        if code := execute([*step, "--overwrite"]):
            return code
    results = f"{output}/{{{','.join(_RUNS)}}}/results"
    print(f"\nLook at {(evaluation / 'index.html').absolute()},")
    print(f"the heatmaps in {results}/heatmaps, the verdicts in {results}/results.csv.")
    return 0


COMMANDS = {"demo": _demo}
