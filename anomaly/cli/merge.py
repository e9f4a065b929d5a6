"""`anomaly merge`: models of one setting that become one."""

from __future__ import annotations

import argparse
from pathlib import Path

from anomaly.cli.common_options import device_and_threads
from anomaly.files.outputs import RUN, locked
from anomaly.files.writing import claim
from anomaly.storage.folder import check_run_folder, find_model
from anomaly.storage.load import load_model
from anomaly.training.runs import keep_run


def run(options: argparse.Namespace) -> int:
    """Join models."""
    output: Path = options.output
    check_run_folder(output, [find_model(given, exported=False) for given in options.models])
    from anomaly.training.merge import merge

    with locked(output):
        claim(output, RUN, overwrite=options.overwrite)
        device, _ = device_and_threads(options, options.models)
        models = [load_model(folder, device) for folder in options.models]
        merged = merge(models, [str(folder) for folder in options.models])
        model_id = keep_run(merged, output, options.models, overwrite=options.overwrite)
    if merged.thresholds is None:
        print(
            "no thresholds, because one of the models has none; find some with `anomaly "
            "calibrate --good`"
        )
    else:
        print("\n".join(merged.thresholds.lines()))
    counts = " + ".join(str(len(model.manifest["training_images"])) for model in models)
    learned = len(merged.manifest["training_images"])
    print(f"model {model_id}, of {learned} images ({counts}), is in {output / 'model'}")
    return 0
