"""`anomaly update`: a model learns good parts that people have confirmed."""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli import annex
from anomaly.cli.common import agreed, chosen_device, images_given
from anomaly.cli.terminal import ProgressLine
from anomaly.datasets import Sample
from anomaly.errors import AnomalyError, DataError, first_of
from anomaly.files.writing import RUN, claim, locked
from anomaly.scoring.model import Model
from anomaly.storage.folder import check_run_folder, find_model
from anomaly.storage.load import load_model

if TYPE_CHECKING:
    from anomaly.line.record import Confirmed

_JUDGED = "judged"  # the record's judged pictures, as a data set; never written over

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Learn, compare verdicts, and write the new run.

    Returns:
        0 done, 3 done without some images that can't be used, 1 refused, because a known defect
        that is caught now would be called good; nothing was written.
    """
    if not options.good and options.feedback is None:
        raise AnomalyError("there is nothing to learn; give --good, --feedback, or both")
    # Good images keep their files' names in the model; defects of several folders may share names.
    good = [replace(image, name=image.path.name) for image in images_given(options, "good")]
    defects = images_given(options, "defects")
    folder = find_model(options.model, exported=False)
    output: Path = options.output
    check_run_folder(output, folder)
    with locked(output):
        kept = () if options.feedback is None else (_JUDGED,)
        claim(output, (*RUN, *kept), overwrite=options.overwrite)
        with tempfile.TemporaryDirectory(prefix=".update-", dir=output) as scratch:
            return _run(options, folder, Path(scratch), good, defects)


def _run(
    options: argparse.Namespace,
    folder: Path,
    scratch: Path,
    good: list[Sample],
    defects: list[Sample],
) -> int:
    from anomaly.desk.update import update

    device = chosen_device(options)
    model = load_model(folder, device)
    past: list[Sample] = []
    if options.feedback is not None:
        confirmed = _confirmed(options.feedback, model, scratch)
        good, defects = [*confirmed.good, *good], [*confirmed.defects, *defects]
        past = confirmed.past
    if not good:
        raise DataError(f"{options.feedback} has no part with a picture that was called good")
    with ProgressLine() as progress:
        updated = update(
            model,
            good,
            defects=defects,
            past=past,
            include_suspects=options.include_suspects,
            scratch=scratch,
            progress=progress,
        )
    refused = list(updated.learned.refused.values())
    for reason in first_of(refused):
        log.warning("skipped: %s", reason)
    print("\n".join(updated.lines()))
    if updated.moved.caution:
        log.warning(updated.moved.caution)
    if updated.learned.suspects:
        print("Check the suspects; if they are good, add --include-suspects")
    if not agreed([updated.cost.refusal], options):
        return 1
    output: Path = options.output
    model_id = updated.keep(options.model, output, overwrite=options.overwrite)
    if (scratch / _JUDGED).is_dir():
        (scratch / _JUDGED).rename(output / _JUDGED)
    print(f"{output / 'model'} holds model {model_id}, updated from {folder}")
    return 3 if refused else 0


def _confirmed(record: Path, model: Model, scratch: Path) -> Confirmed:
    """The parts of a record that people have judged."""
    from anomaly.desk.update import lineage

    confirmed: Confirmed = annex("line.record").confirmed_parts(record, lineage(model), scratch)
    if confirmed.lost:
        log.warning(
            "%d judged parts were left out, because the record has no picture of them (see "
            "--keep-good and --keep-pictures of serve)",
            confirmed.lost,
        )
    return confirmed
