"""The images that `anomaly calibrate` is given, scored, and what is said of them."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli.progress import ProgressLine
from anomaly.datasets import check_good_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError, first_of
from anomaly.evaluation.held_out import score_held_out
from anomaly.evaluation.test_split import tested_hashes

if TYPE_CHECKING:
    from anomaly.evaluation.held_out import HeldOutScores
    from anomaly.model.scoring import Model

log = logging.getLogger(__name__)


def scored_images(
    options: argparse.Namespace, model: Model, threads: int
) -> dict[str, HeldOutScores]:
    """The scores of the images that were given, by option.

    Raises:
        DataError: an image is given as good and as a defect, or belongs to the test split; or none
            can be used.
    """
    given = {name: getattr(options, name) for name in ("good", "defects")}
    given = {name: inputs for name, inputs in given.items() if inputs is not None}
    found = {name: find_inputs(paths, option=f"--{name}").paths for name, paths in given.items()}
    check_good_inputs(given.get("good", ()), found.get("good", ()))
    # Copies are found by their hashes, once all are scored.
    if twice := set(found.get("good", ())) & set(found.get("defects", ())):
        raise _twice(min(twice))
    tested = _tested(options, model) if given else frozenset()
    scored: dict[str, HeldOutScores] = {}
    for name, paths in found.items():
        with ProgressLine() as progress:
            scored[name] = score_held_out(
                model,
                paths,
                what=f"--{name}",
                tested=tested,
                workers=threads,
                progress=lambda done, total, name=name: progress(name, done, total),  # type: ignore[misc]
            )
        for reason in first_of(scored[name].refused, f" of --{name}"):
            log.warning("skipped: %s", reason)
    if len(scored) > 1:
        defects = set(scored["defects"].hashes)
        for path, sha256 in scored["good"].named_hashes().items():
            if sha256 in defects:
                raise _twice(path)
    return scored


def _twice(path: Path | str) -> DataError:
    return DataError(f"{path} is given as good and as a defect; give it once")


def _tested(options: argparse.Namespace, model: Model) -> frozenset[str]:
    """Hashes of the test split, where the run remembers its data set and it is still there."""
    try:
        return tested_hashes(model, options.model, options.data_root)
    except AnomalyError as error:
        if options.data_root is not None:
            raise
        log.warning(
            "%s: make sure yourself that these images aren't those the model is evaluated on, or "
            "name the data set's folder with --data-root",
            error,
        )
        return frozenset()
