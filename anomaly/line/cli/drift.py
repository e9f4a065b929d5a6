"""`anomaly drift`: do the parts still look like the good images that the thresholds stand on?"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.calibration.rates import percent
from anomaly.cli.common_options import number
from anomaly.cli.logging_setup import NOTE
from anomaly.errors import DataError
from anomaly.files.writing import write
from anomaly.line.drift import HORIZON, Drift, levels_of
from anomaly.line.drift_page import drift_html, read_scores
from anomaly.storage.exported import files_of, read_export
from anomaly.storage.folder import EXPORT, check_files, find_model, model_id, read_manifest
from anomaly.storage.thresholds import read_thresholds, thresholds_alone_differ

if TYPE_CHECKING:
    from anomaly.calibration import Thresholds

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, required=True, help="the run, or its model/ folder")
    parser.add_argument(
        "--rows",
        type=Path,
        required=True,
        metavar="FILE",
        help="results.csv or results.jsonl of infer, or the record of serve (line.sqlite)",
    )
    parser.add_argument(
        "--defects",
        type=number,
        default=0.01,
        metavar="SHARE",
        help="share of parts that are usually defective (0.01)",
    )
    parser.add_argument(
        "--false-alarms",
        type=number,
        default=0.05,
        metavar="SHARE",
        help="chance of an alarm in 2,000 parts that haven't changed (0.05)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="a page of charts, replaced each time"
    )


def run(options: argparse.Namespace) -> int:
    """Look at a stream.

    Returns:
        0 nothing has changed as far as is seen, 1 an alarm.
    """
    thresholds = _thresholds(options)
    folder = find_model(options.model)
    if options.rows.is_dir():  # the output of infer
        options.rows /= "results.csv"
    stream = read_scores(options.rows, {model_id(folder), *thresholds_alone_differ(folder)})
    try:
        levels = levels_of(thresholds, defects=options.defects, false_alarms=options.false_alarms)
    except ValueError:
        raise DataError(
            f"--defects is {options.defects:g} and --false-alarms {options.false_alarms:g}; they "
            "must be 0 to 0.5, and between 0 and 1"
        ) from None
    drift = Drift(levels, keep=True).add_all(stream.scores)
    for line in stream.notes:
        log.log(NOTE, line)
    said = [
        *drift.lines(),
        f"{HORIZON} parts that are as promised raise an alarm with a chance of at most "
        f"{percent(options.false_alarms)}; {percent(options.defects)} of parts are taken to be "
        f"defective, {thresholds.images} good images stand behind the levels",
    ]
    print("\n".join(said))
    if options.output is not None:
        facts = f"{drift.parts} parts of {options.rows}, {options.model}"
        write(options.output, drift_html(drift, stream.scores, said, facts))
        print(f"charts in {options.output}")
    alarm = drift.alarm
    if alarm is None:
        print("no drift is seen")
        return 0
    when = stream.times[alarm.alarm or 0]
    at = f" ({when})" if when else ""
    print(f"alarm: the parts have drifted, seen at part {(alarm.alarm or 0) + 1}{at}")
    return 1


def _thresholds(options: argparse.Namespace) -> Thresholds:
    folder = find_model(options.model)
    manifest, export = read_manifest(folder), read_export(folder)
    check_files(folder, files_of(manifest, export), [EXPORT] if export else [])
    thresholds = read_thresholds(folder)
    if thresholds is None:
        raise DataError(
            f"{options.model} has no thresholds, so nothing is promised that could be broken; "
            "find some with anomaly calibrate"
        )
    return thresholds
