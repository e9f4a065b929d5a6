"""`anomaly start`: from a folder of images to a trained model and a page, in one go."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli import execute
from anomaly.cli.check import as_text, reading_of
from anomaly.cli.common import passed_on
from anomaly.cli.terminal import ProgressLine, command_line
from anomaly.config.load import parse_config
from anomaly.config.schema import METHODS, readers
from anomaly.datasets import open_dataset
from anomaly.datasets.layouts import LIST_SUFFIX, recognise
from anomaly.datasets.lists import listing_of
from anomaly.desk.check import SMALL_SET, Severity, advice, check
from anomaly.errors import DataError, OutputError
from anomaly.files.writing import at_home, claim, from_json, locked, write
from anomaly.storage.folder import check_run_folder

if TYPE_CHECKING:
    from anomaly.config.schema import Config
    from anomaly.datasets import Dataset
    from anomaly.datasets.layouts import Recognised
    from anomaly.desk.check import Advice, DataReport, Reading

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Look, check, train, evaluate, show."""
    named = {"name": options.name or _name_of(options.folder)}
    settings = parse_config(named, "--name", options.overrides)
    options.output = options.output or Path("runs") / settings.name
    options.interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with locked(options.output):  # the commands that follow work within this lock
        return _start(options, settings)


def _start(options: argparse.Namespace, settings: Config) -> int:
    output, name = options.output, settings.name
    ask = input if options.interactive else None
    taken = recognise(options.folder, options.format, ask)
    config = output / f"{name}.yaml"
    check_run_folder(output)
    claim(output, ("model",), overwrite=options.overwrite)
    if config.exists() and not options.overwrite:  # somebody may have changed it
        train = ["train", "--config", str(config), "--output", str(output)]
        raise OutputError(
            f"{config} exists from an earlier start; use it with `anomaly {shlex.join(train)}`, or "
            "add --overwrite to write it anew"
        )
    log.info(f"{options.folder} is read as --format {taken.layout}: {taken.reason}")
    if taken.listing:
        listing = output.absolute() / "images.csv"
        write(listing, taken.listing)
        log.info(f"they are listed in {listing}")
        taken = replace(taken, root=listing, listing="")
    network, why = _network(options.overrides)
    if network is not None:
        log.info(f"the network is {network}: {why}")
    kind = settings.model.kind
    tileable = settings.image.resize is None and not METHODS[kind].one_grid
    reading = reading_of(settings)
    reading = replace(reading, tiled=reading.tiled or tileable)
    taken, dataset, report = _look(taken, reading, output.absolute() / "images.csv")
    if dataset.drawn:
        good = sum(not sample.is_defect for sample in dataset.test)
        total = good + len(dataset.train)
        log.info(f"- {good} of {total} good images are kept for testing, not for training")
    hints = [
        hint
        for hint in advice(report)
        if kind in (readers(hint.key) or [kind]) and (tileable or hint.key != "image.tile")
    ]
    for hint in hints:
        log.info(f"- {hint.reason} ({hint.key}: {hint.value})")
    write(config, config_text(name, taken, network, hints))
    log.info(f"the settings are in {config}; edit them if you know better")
    # What the hints have settled is no fault any more.
    report = replace(report, faults=tuple(f for f in report.faults if f.kind != "bit_depth"))
    code = _train(options, config, dataset, report)
    if code not in (0, 3):
        return code
    return _show(options, config, report, None if dataset.test else taken.root, code)


def _train(options: argparse.Namespace, config: Path, dataset: Dataset, report: DataReport) -> int:
    """Say what was found and train, each printed as the command that can be run alone.

    Args:
        options: of the command.
        config: to check and train with.
        dataset: the images.
        report: on them.

    Raises:
        DataError: a picture has two labels: training or evaluation would be refused.
    """
    settings, computes = passed_on(options)
    of_config = ["--config", str(config), *settings]
    log.info("\n$ anomaly %s", command_line(["check", *of_config]))
    print(as_text(report, dataset.folder))
    for fault in report.faults:
        if fault.kind == "two_labels":
            raise DataError(fault.detail)
    if report.has(Severity.WRONG):
        log.info(
            "the faulty files listed above are left out; if too few images remain, training will "
            "stop with an error"
        )
    if single := report.splits["train"].usable == 1:
        log.info(
            "one image can't show how good parts vary, so there are no thresholds and no verdicts"
        )
    uncalibrated = ["--no-calibrate"] if single else []
    overwrite = ["--overwrite"] if options.overwrite else []
    output = ["--output", str(options.output)]
    train = ["train", *of_config, *output, *uncalibrated, *overwrite, *computes]
    return execute(train, reported={fault.detail for fault in report.faults})


def _show(
    options: argparse.Namespace, config: Path, report: DataReport, scored: Path | None, code: int
) -> int:
    """Evaluate the model, or score images without labels, and open the page.

    Args:
        options: of the command.
        config: that it was trained with.
        report: on the images.
        scored: the images; None where the data set has test images.
        code: the exit code of training.

    Returns:
        The exit code of the worst.
    """
    output: Path = options.output
    overwrite = ["--overwrite"] if options.overwrite else []
    _, computes = passed_on(options)
    model = ["--model", str(output)]
    if scored is None:
        folder = output / "evaluation"
        command = ["evaluate", *model]
    else:
        folder = output / "results"
        suspects = output / "suspects"
        unseen = f" Those that looked most unusual in training are in {suspects}."
        log.info(
            "There are no other images to test with, so the training images are scored: "
            "anything marked is unusual even among them." + (unseen if suspects.is_dir() else "")
        )
        command = ["infer", *model, "--input", str(scored)]
    code = max(code, execute([*command, "--output", str(folder), *overwrite, *computes]))
    for page in (*folder.glob("*/report.html"), *folder.glob("results.html")):
        print(f"\nLook at {page.absolute()}")
        log.info(f"New images: anomaly infer {shlex.join(model)} --input FOLDER --output FOLDER")
        _say_last(report, code)
        if options.interactive and not options.no_open:
            webbrowser.open(page.absolute().as_uri())
    return max(code, _offer_tuning(options, config, folder / "metrics.json"))


def _say_last(report: DataReport, code: int) -> None:
    """Repeat what mustn't be missed."""
    if 1 < report.splits["train"].usable < SMALL_SET:
        log.warning(
            f"only {report.splits['train'].usable} good images to learn from, so thresholds aren't "
            f"reliable: give {SMALL_SET} at least, better 300"
        )
    if code == 3:
        log.warning("exit code 3: files that can't be used were left out, as named above")


def _offer_tuning(options: argparse.Namespace, config: Path, figures: Path) -> int:
    """Offer to look for settings that catch defects which pass.

    Returns:
        The exit code of `tune`, where somebody wants it; else 0.
    """
    if not (options.interactive and figures.is_file()):  # or there was nothing to evaluate with
        return 0
    (evaluated,) = from_json(figures.read_text("utf-8"))["categories"].values()
    if not (evaluated["verdicts"] or {}).get("escapes"):
        return 0
    if input("Try other settings? [y/N] ").strip().lower() not in ("y", "yes"):
        return 0
    settings, computes = passed_on(options)
    overwrite = ["--overwrite"] if options.overwrite else []
    return execute(["tune", "--config", str(config), *settings, *overwrite, *computes])


def config_text(name: str, taken: Recognised, network: str | None, hints: Iterable[Advice]) -> str:
    """A config of the few settings that matter, as YAML.

    Args:
        name: of the product.
        taken: what its images are taken for.
        network: the backbone; None where the settings on the command line name one.
        hints: further settings.
    """
    import yaml

    values: dict[str, Any] = {
        "name": name,
        "data": {"format": taken.layout, "root": str(taken.root)},
    }
    if network is not None:
        values["backbone"] = {"name": network, "weights": "imagenet"}
    for hint in hints:
        section, _, key = hint.key.partition(".")
        values.setdefault(section, {})[key] = hint.value
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"# Written by `anomaly start`. The documentation (Settings) has all keys.\n{text}"


def _look(
    taken: Recognised, reading: Reading, listing: Path
) -> tuple[Recognised, Dataset, DataReport]:
    """What the images are taken for, the data set that they make, and what there is to know of it.

    Args:
        taken: what they are recognised as.
        reading: how they are read.
        listing: where they are listed, if their split is drawn and would part copies.

    Raises:
        DataError: none of the images to learn from can be used.
    """
    dataset = open_dataset(taken.layout, taken.root, None)
    with ProgressLine() as progress:
        report = check(dataset, reading, partial(progress, "looking"))
    if not report.splits["train"].usable:
        raise DataError(next(f.detail for f in report.faults if f.kind == "too_few_images"))
    learned = {sample.name for sample in dataset.train}
    parted = any(0 < len(learned & {*names}) < len(names) for names in report.copies)
    if not (dataset.drawn and parted):
        return taken, dataset, report
    write(listing, listing_of(dataset, report.copies))
    log.info(
        f"copies of one image are kept together, all for training or all for testing; see {listing}"
    )
    return _look(replace(taken, layout="csv", root=listing), reading, listing)


def _network(settings: Sequence[str]) -> tuple[str | None, str]:
    """The backbone whose weights can be had, and why it is that one."""
    if any(setting.startswith("backbone.") for setting in settings):
        return None, ""
    from anomaly.backbones.networks import backbone_at_hand

    return backbone_at_hand()


def _name_of(folder: Path) -> str:
    place = at_home(folder).absolute()
    name = place.stem if place.suffix.lower() == LIST_SUFFIX else place.name
    return name.lstrip(".") or "model"
