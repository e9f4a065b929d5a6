"""`anomaly calibrate`, `update` and `tune`: other thresholds, more good parts, other settings."""

from __future__ import annotations

import argparse
import logging
import shlex
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli import annex
from anomaly.cli.terminal import ProgressLine, agreed
from anomaly.config.load import FOLDERS, find_config, load_config
from anomaly.datasets.inputs import open_test_images
from anomaly.datasets.layouts import open_dataset
from anomaly.datasets.samples import Sample
from anomaly.desk.calibrate import Wishes, recalibrate
from anomaly.desk.change import samples_of
from anomaly.errors import AnomalyError, DataError
from anomaly.files.writing import RUN, claim, locked
from anomaly.runtime import device_of
from anomaly.scoring.model import Model
from anomaly.storage.folder import HISTORY, check_run_folder, find_model
from anomaly.storage.models import load_model, save

if TYPE_CHECKING:
    from anomaly.line.record import Confirmed

log = logging.getLogger(__name__)

_JUDGED = "judged"  # the record's judged pictures, as a data set


def run_calibrate(options: argparse.Namespace) -> int:
    """Choose thresholds and write them into the model folder.

    Returns:
        0 done; 3 done without some unusable images; 1 refused and nothing written, because known
        defects that are caught now would pass, or the reject threshold would rise by more than
        chance explains.
    """
    # Each wish has the name of its option.
    wishes = Wishes(**{field.name: getattr(options, field.name) for field in fields(Wishes)})
    wishes.check(good=bool(options.good), production=bool(options.production))
    images = {name: _images_of(options, name) for name in ("good", "defects")}
    unsorted = bool(wishes.at_most_defective)
    images["production"] = _images_of(options, "production", unsorted=unsorted)
    model = find_model(options.model, exported=False).resolve()
    with locked(model.parent if model.name == "model" else model):  # a run's lock is its model's
        return _recalibrate(options, wishes, images)


def _recalibrate(
    options: argparse.Namespace, wishes: Wishes, images: dict[str, list[Sample]]
) -> int:
    """Show what other thresholds change, and save them; returns the exit code.

    `images` are those of each option, by its name.
    """
    model = load_model(options.model)
    with ProgressLine() as progress:
        change = recalibrate(model, wishes, **images, progress=progress)
    print("\n".join(change.lines()))
    thresholds = change.after.thresholds
    if thresholds is None or thresholds == model.thresholds:
        print("the model already has these thresholds; nothing was changed")
    elif agreed(change.doubts, options):
        folder = find_model(options.model)
        after = save(change.after, folder, overwrite=True)
        print(
            f"new thresholds saved: model {model.model_id} is now {after}; all changes are listed "
            f"in {folder / HISTORY}"
        )
        if model.thresholds is not None:
            run = shlex.quote(str(options.model))
            log.info("To undo: anomaly calibrate --model %s --undo", run)
    else:
        return 1
    return 3 if change.refused else 0


def _images_of(options: argparse.Namespace, name: str, *, unsorted: bool = False) -> list[Sample]:
    """The images of an option, listed before torch is imported; empty without the option.

    Args:
        options: the command's options.
        name: the option's name, without the dashes.
        unsorted: names of folders and files mean nothing, for nobody has sorted the images.
    """
    paths: list[Path] = getattr(options, name)
    defects = None if unsorted else name == "defects"
    return samples_of(paths, f"--{name}", defects=defects) if paths else []


def run_update(options: argparse.Namespace) -> int:
    """Learn, compare verdicts, and write the new run.

    Returns:
        0 done; 3 done without some unusable images; 1 refused and nothing written, because a known
        defect that is caught now would be called good.
    """
    if not options.good and options.feedback is None:
        raise AnomalyError("there is nothing to learn; give --good, --feedback, or both")
    good = _images_of(options, "good")
    defects = _images_of(options, "defects")
    folder = find_model(options.model, exported=False)
    output: Path = options.output
    check_run_folder(output, folder)
    with locked(output):
        # Judged pictures of an earlier update may exist nowhere else: --overwrite spares them.
        kept = () if options.feedback is None else (_JUDGED,)
        claim(output, (*RUN, *kept), overwrite=options.overwrite)
        with tempfile.TemporaryDirectory(prefix=".update-", dir=output) as scratch:
            return _learn(options, folder, Path(scratch), good, defects)


def _learn(
    options: argparse.Namespace,
    folder: Path,
    scratch: Path,
    good: list[Sample],
    defects: list[Sample],
) -> int:
    """Show what further good images change, and write the new run; returns the exit code.

    The model in `folder` learns; `scratch` takes features and judged pictures, and is deleted.
    """
    from anomaly.desk.update import save_updated, update

    model = load_model(folder)
    past: list[Sample] = []
    if options.feedback is not None:
        confirmed = _confirmed(options.feedback, model, scratch)
        good, defects = [*confirmed.good, *good], [*confirmed.defects, *defects]
        past = confirmed.past
    if not good:
        raise DataError(f"{options.feedback} has no part with a picture that was called good")
    with ProgressLine() as progress:
        change = update(
            model,
            good,
            defects=defects,
            past=past,
            include_suspects=options.include_suspects,
            scratch=scratch,
            progress=progress,
        )
    print("\n".join(change.lines()))
    if not agreed(change.doubts, options):
        return 1
    output: Path = options.output
    model_id = save_updated(change.after, options.model, output, overwrite=options.overwrite)
    if (scratch / _JUDGED).is_dir():
        (scratch / _JUDGED).rename(output / _JUDGED)
    print(f"{output / 'model'} holds model {model_id}, updated from {folder}")
    return 3 if change.refused else 0


def _confirmed(record: Path, model: Model, scratch: Path) -> Confirmed:
    """Write the pictures of a line's record into `scratch`, and warn of parts without one."""
    from anomaly.desk.update import lineage

    confirmed: Confirmed = annex("line.record").confirmed_parts(record, lineage(model), scratch)
    if confirmed.lost:
        log.warning(
            "%d judged parts were left out, because the record has no picture of them (see "
            "--keep-good and --keep-pictures of serve)",
            confirmed.lost,
        )
    return confirmed


def run_tune(options: argparse.Namespace) -> int:
    """Try settings, print how many defects each catches, and write the best; returns 0."""
    config = load_config(options.config, options.overrides)
    output = _tuned_file(options)
    dataset = open_dataset(config.data.format, config.data.root, config.data.category)
    defects = open_test_images((), options.defects) if options.defects else None
    device = device_of(options.device)
    from anomaly.desk.tune import tune

    with ProgressLine() as progress:
        tuning = tune(
            config,
            dataset,
            defects=defects,
            budget=options.budget,
            device=device,
            progress=progress,
        )
    print("\n".join(tuning.lines()))
    tuning.write(output)
    better = tuning.judgement.better
    settings = "The settings are" if better else "Your settings, unchanged, are"
    print(f"\n{settings} in {output}")
    if better:
        print(f"Train with them: anomaly train --config {shlex.quote(str(output))}")
        model = shlex.quote(f"runs/{tuning.config.name}")
        print(f"See the result:  anomaly evaluate --model {model} --output {model}/evaluation")
    return 0


def _tuned_file(options: argparse.Namespace) -> Path:
    """The YAML file that tune writes: --output, or `<config>_tuned.yaml`.

    Raises:
        OutputError: the file exists already.
        AnomalyError: the file isn't YAML, or there is no config of this name.
    """
    file: Path | None = options.output
    if file is None:
        original = find_config(options.config)
        # A built-in config's folder is the program's: the new one goes into the current folder.
        built_in = any(original.is_relative_to(folder) for folder in FOLDERS[1:])
        file = (Path() if built_in else original.parent) / f"{original.stem}_tuned.yaml"
    if file.suffix not in (".yaml", ".yml"):
        raise AnomalyError(f"--output {file} must end in .yaml")
    claim(file.parent, [file.name], overwrite=options.overwrite)
    return file
