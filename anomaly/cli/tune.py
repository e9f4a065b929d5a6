"""`anomaly tune`: settings tried on known defects, and a config of those that catch more."""

from __future__ import annotations

import argparse
import logging
import shlex
from pathlib import Path

from anomaly.cli.common import chosen_device
from anomaly.cli.terminal import ProgressLine
from anomaly.config.load import FOLDERS, find_config, load_config
from anomaly.datasets import open_dataset, open_test_images
from anomaly.errors import AnomalyError, OutputError

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Try settings, print the results, and write the chosen ones."""
    config = load_config(options.config, options.overrides)
    output = _output(options)
    dataset = open_dataset(config.data.format, config.data.root, config.data.category)
    given = options.good or options.defects
    named = open_test_images(options.good, options.defects) if given else ()
    device = chosen_device(options)
    from anomaly.desk.tune import tune

    with ProgressLine() as progress:
        tuning = tune(
            config,
            dataset,
            defects=[s for s in named if s.is_defect] if options.defects else None,
            good=[s for s in named if not s.is_defect] if options.good else None,
            budget=options.budget,
            device=device,
            say=log.info,
            progress=progress,
        )
    print("\n".join(tuning.lines()))
    tuning.write(output)
    better = tuning.judgement.better
    which = "The settings are" if better else "Your settings, unchanged, are"
    print(f"\n{which} in {output}, all figures in {output.with_suffix('.json')}")
    if better:
        print(f"Train with them: anomaly train --config {shlex.quote(str(output))}")
        model = shlex.quote(f"runs/{tuning.config.name}")
        print(f"See the result:  anomaly evaluate --model {model} --output {model}/evaluation")
    return 0


def _output(options: argparse.Namespace) -> Path:
    """The config to write.

    Raises:
        OutputError: it exists already, or isn't a YAML file.
        AnomalyError: there is no such config.
    """
    file: Path | None = options.output
    if file is None:
        original = find_config(options.config, FOLDERS)
        built_in = any(original.is_relative_to(folder) for folder in FOLDERS[1:])
        file = (Path() if built_in else original.parent) / f"{original.stem}_tuned.yaml"
    if file.suffix not in (".yaml", ".yml"):
        raise AnomalyError(f"--output {file} must end in .yaml")
    for each in (file, file.with_suffix(".json")):
        if each.exists() and not options.overwrite:
            raise OutputError(f"{each} exists already; give another --output or add --overwrite")
    return file
