"""`anomaly demo`: a generated product, and everything once on it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from anomaly.cli import execute
from anomaly.cli.terminal import ProgressLine
from anomaly.desk.demo import write_sample_data
from anomaly.files.writing import locked

_DATA, _CONFIG = Path("data/sample/brushed_plate"), Path("sample_brushed_plate.yaml")


def run(options: argparse.Namespace) -> int:
    """Generate, train, infer, evaluate; what an earlier demo left behind is replaced."""
    model, evaluation = options.output / "plate", options.output / "evaluation"
    results = model / "results"
    with locked(_DATA.parent), ProgressLine() as progress:
        write_sample_data(_DATA, overwrite=True, progress=partial(progress, "images"))
    print(f"sample images in {_DATA}")
    steps: list[list[object]] = [
        ["train", "--config", _CONFIG, "--output", model],
        ["infer", "--model", model, "--input", _DATA / "test", "--output", results],
        ["evaluate", "--model", model, "--output", evaluation],
    ]
    for step in steps:
        if code := execute([*map(str, step), "--overwrite"]):
            return code
    print(f"\nLook at {(evaluation / _CONFIG.stem / 'report.html').absolute()},")
    print(f"the heatmaps in {results}/heatmaps, the verdicts in {results}/results.csv.")
    return 0
