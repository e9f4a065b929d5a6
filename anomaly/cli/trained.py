"""A config -> its trained run: the one that is there, or a new one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anomaly.cli import train
from anomaly.errors import AnomalyError, ConfigError, why
from anomaly.files.output_lock import locked


def trained_run(
    config_file: str, overrides: Sequence[str], runs: Path, machine: Sequence[str]
) -> Path:
    """The run of a config, trained now unless it has been before.

    Args:
        config_file: as for `train --config`.
        overrides: as for `train --set`.
        runs: the folder of runs.
        machine: command-line options that choose device and threads.

    Raises:
        ConfigError: a run of this name was trained with other settings.
        AnomalyError: training failed.
    """
    from anomaly.config.files import load_config

    config = load_config(config_file, overrides)
    run = runs / config.name
    with locked(run):  # it may be being trained
        if (run / "model").exists():
            _check_same(run, config)
        else:
            _train(config_file, overrides, run, machine)
    return run


def _train(config_file: str, overrides: Sequence[str], run: Path, machine: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    sets = [part for override in overrides for part in ("--set", override)]
    arguments = ["--config", config_file, *sets, "--output", str(run), *machine]
    if train.run(parser.parse_args(arguments)) not in (0, 3):
        raise AnomalyError(f"training {config_file} failed")


def _check_same(run: Path, config: Any) -> None:
    import yaml

    from anomaly.datasets import open_dataset
    from anomaly.model.settings import flat, portable

    file, summary = run / "model" / "config.yaml", run / "train.json"
    try:
        before = dict(flat(yaml.safe_load(file.read_text("utf-8"))))
        before["data folder"] = json.loads(summary.read_text("utf-8"))["data_folder"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"what {run} was trained with can't be read ({why(error)}); train it again, or "
            f"evaluate it as it is with --model {run}"
        ) from None
    now = dict(flat(portable(config)))
    dataset = open_dataset(config.data.format, config.data.root, config.data.category)
    now["data folder"] = str(dataset.folder.absolute())
    if now["precision"] == "auto":  # settled at training
        before["precision"] = now["precision"]
    different = [
        f"{key} is {before.get(key)!r} there and {now.get(key)!r} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if different:
        raise ConfigError(
            f"{run} was trained with other settings ({'; '.join(different)}); give another --runs "
            f"folder, another name (--set name=…), or evaluate it as it is with --model {run}"
        )
