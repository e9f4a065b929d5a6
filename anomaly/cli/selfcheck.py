"""`anomaly selfcheck`: scores known parts before a shift, and names changed verdicts or scores."""

from __future__ import annotations

import argparse
import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from anomaly.cli.common import chosen_device
from anomaly.cli.terminal import ProgressLine
from anomaly.datasets.inputs import find_inputs
from anomaly.desk.golden import (
    golden_of,
    is_missed,
    missed_parts,
    moved_since,
    read_record,
    say_caught,
    score_golden,
    write_record,
)
from anomaly.errors import AnomalyError
from anomaly.files.writing import GOLDEN, locked
from anomaly.storage.folder import find_model
from anomaly.storage.load import load_model

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Check, or record.

    Returns:
        0 nothing has changed (or all is recorded), 1 a score or a verdict has, or an image is
        missing or new.
    """
    if not options.tolerance >= 0:
        raise AnomalyError(f"--tolerance is {options.tolerance}; it must be 0 or more")
    paths = find_inputs([options.golden], option="--golden").paths
    with locked(options.golden) if options.record else nullcontext():
        return _run(options, paths)


def _run(options: argparse.Namespace, paths: list[Path]) -> int:
    recorded = None if options.record else read_record(options.golden)

    device = chosen_device(options)
    model = load_model(options.model, device)
    with ProgressLine() as progress:
        scores = score_golden(model, paths, options.golden, partial(progress, "scoring"))
    if (own := golden_of(find_model(options.model))) and own.resolve() != options.golden.resolve():
        scores |= score_golden(model, missed_parts(own), own)
    if recorded is None:
        write_record(options.golden, model.model_id, scores)
        print(f"{len(scores)} images recorded in {options.golden / GOLDEN}")
        return 0
    if recorded["model_id"] != model.model_id:
        log.info(f"recorded with model {recorded['model_id']}, checked with {model.model_id}")
    moved = moved_since(recorded["images"], scores, options.tolerance)
    for name, change in moved.items():
        print(f"{name}: {change}")
    names = {name for name in scores if not is_missed(name)}
    kept = len(names - moved.keys())
    print(f"{kept} of {len(names)} images score as recorded" + ("" if moved else ": ready"))
    if known := say_caught(scores):
        print(known)
    return 1 if moved else 0
