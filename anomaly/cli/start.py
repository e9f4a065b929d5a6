"""`anomaly start`, `anomaly check` and `anomaly demo`: from images to a model and a page."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import tempfile
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from anomaly.cli import execute
from anomaly.cli.terminal import ProgressLine, agrees, command_line, is_interactive
from anomaly.config.load import load_config, parse_config
from anomaly.config.schema import METHODS, Config, readers
from anomaly.datasets.inputs import listing_of
from anomaly.datasets.layouts import LIST_SUFFIX, Recognised, open_dataset, recognise
from anomaly.datasets.samples import Dataset
from anomaly.desk.check import (
    SMALL_SET,
    Advice,
    DataReport,
    Reading,
    Severity,
    advice,
    check,
    pose_advice,
)
from anomaly.desk.demo import write_sample_data
from anomaly.errors import DataError, OutputError
from anomaly.files.writing import at_home, claim, from_json, locked, write
from anomaly.report.page import region_page
from anomaly.scoring.build import decoding_of, region_of
from anomaly.storage.folder import check_run_folder

log = logging.getLogger(__name__)

_SHOWN = 5  # files of a fault, where `start` looks
_DATA, _CONFIG = Path("data/sample/brushed_plate"), Path("sample_brushed_plate.yaml")


def run_check(options: argparse.Namespace) -> int:
    """Check a data set, or draw the region that counts.

    Returns:
        0 all fine, 3 some files can't be used, 2 training or evaluation would be wrong.
    """
    config = load_config(options.config, options.overrides)
    if options.region is not None:
        output = Path(tempfile.mkdtemp(prefix="anomaly-")) / "region.html"
        write(output, region_page(options.region, decoding_of(config.image)))
        print(f"draw in {output}, then copy the lines it shows into your config")
        _open(output)
        return 0
    data = config.data
    dataset = open_dataset(data.format, data.root, data.category)
    with ProgressLine() as progress:
        report = check(dataset, _reading(config), partial(progress, "reading"))
    print("\n".join([str(dataset.folder), *report.lines()]))
    if report.has(Severity.WRONG):
        return 2
    return 3 if report.has(Severity.UNUSABLE) else 0


def _reading(config: Config) -> Reading:
    """The preprocessing that a config asks for."""
    image = config.image
    region = region_of(image, Path())
    return Reading(decoding_of(image), region, image.tile is not None, config.one_aspect)


def _open(page: Path) -> None:
    """Open a page where somebody sits at this machine's terminal."""
    if is_interactive() and "SSH_CONNECTION" not in os.environ:
        webbrowser.open(page.absolute().as_uri())


def run_demo(options: argparse.Namespace) -> int:
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


def run_start(options: argparse.Namespace) -> int:
    """Look, check, train, evaluate, show."""
    named = {"name": options.name or _name_of(options.folder)}
    settings = parse_config(named, "--name", options.overrides)
    options.output = options.output or Path("runs") / settings.name
    config = options.output / f"{settings.name}.yaml"
    with locked(options.output):  # the commands that follow work within this lock
        taken, dataset, report = _prepare(options, settings, config)
        code = _train(options, config, dataset, report)
        if code in (0, 3):  # 3: trained without some unusable images
            code = _show(options, config, report, None if dataset.test else taken.root, code)
        return code


def _prepare(
    options: argparse.Namespace, settings: Config, config: Path
) -> tuple[Recognised, Dataset, DataReport]:
    """Recognise the data set, look at it, and write the settings that suit it.

    Args:
        options: the command's options.
        settings: the defaults, with the name and each --set.
        config: the YAML file to write.
    """
    taken = recognise(options.folder, options.format, input if is_interactive() else None)
    check_run_folder(options.output)
    claim(options.output, ("model",), overwrite=options.overwrite)
    if config.exists() and not options.overwrite:  # somebody may have changed it
        train = ["train", "--config", str(config), "--output", str(options.output)]
        raise OutputError(
            f"{config} exists from an earlier start; use it with `anomaly {shlex.join(train)}`, or "
            "add --overwrite to write it anew"
        )
    log.info(f"{options.folder} is read as --format {taken.layout}: {taken.reason}")
    listing = options.output.absolute() / "images.csv"
    if taken.listing:
        write(listing, taken.listing)
        log.info(f"they are listed in {listing}")
        taken = replace(taken, root=listing, listing="")
    network, why = _network(options.overrides)
    if network is not None:
        log.info(f"the network is {network}: {why}")
    kind = settings.model.kind
    tileable = settings.image.resize is None and not METHODS[kind].one_grid
    reading = _reading(settings)
    reading = replace(reading, tiled=reading.tiled or tileable)
    taken, dataset, report = _look(taken, reading, listing)
    if dataset.drawn:
        good = sum(not sample.is_defect for sample in dataset.test)
        total = good + len(dataset.train)
        log.info(f"- {good} of {total} good images are kept for testing, not for training")
    hints = [
        hint
        for hint in advice(report)
        if kind in (readers(hint.key) or [kind]) and (tileable or hint.key != "image.tile")
    ]
    settled = [*options.overrides, *(hint.key for hint in hints)]
    if not any(key.startswith(("image.align", "image.tile")) for key in settled):
        one_grid = METHODS[kind].one_grid
        hints += pose_advice(dataset.train, reading.decoding, one_grid=one_grid)
    for hint in hints:
        log.info(f"- {hint.reason} ({hint.key}: {hint.value})")
    write(config, _config_text(settings.name, taken, network, hints))
    log.info(f"the settings are in {config}; edit them if you know better")
    # The written settings have image.bit_depth now, so that fault is settled.
    faults = tuple(fault for fault in report.faults if fault.kind != "bit_depth")
    return taken, dataset, replace(report, faults=faults)


def _look(
    taken: Recognised, reading: Reading, listing: Path
) -> tuple[Recognised, Dataset, DataReport]:
    """Open and check a data set; where a drawn split would part copies, it is listed anew.

    Args:
        taken: the recognised layout.
        reading: preprocessing of the images.
        listing: CSV file for the new split.

    Returns:
        The layout now, the data set, and the report on it.

    Raises:
        DataError: none of the training images can be used.
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


def _train(options: argparse.Namespace, config: Path, dataset: Dataset, report: DataReport) -> int:
    """Print the faults and train, each after the command that does it alone.

    Raises:
        DataError: a picture has two labels: training or evaluation would be refused.
    """
    settings, rest = _passed_on(options)
    of_config = ["--config", str(config), *settings]
    log.info("\n$ anomaly %s", command_line(["check", *of_config]))
    print("\n".join([str(dataset.folder), *report.lines(_SHOWN)]))
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
    train = ["train", *of_config, "--output", str(options.output), *uncalibrated, *rest]
    return execute(train, reported={fault.detail for fault in report.faults})


def _passed_on(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Arguments for further commands: the changed settings, and device and --overwrite."""
    settings = [part for override in options.overrides for part in ("--set", override)]
    overwrite = ["--overwrite"] if options.overwrite else []
    return settings, ["--device", options.device, *overwrite]


def _show(
    options: argparse.Namespace, config: Path, report: DataReport, scored: Path | None, code: int
) -> int:
    """Evaluate the model, or score images without labels, and open the page.

    Args:
        options: the command's options.
        config: the YAML file that the model was trained with.
        report: faults of the data set.
        scored: folder of images without labels; None where the data set has test images.
        code: exit code of training.

    Returns:
        The highest exit code.
    """
    output: Path = options.output
    settings, rest = _passed_on(options)
    model = ["--model", str(output)]
    if scored is None:
        folder = output / "evaluation"
        command = ["evaluate", *model]
    else:
        folder, suspects = output / "results", output / "suspects"
        unseen = f" Those that looked most unusual in training are in {suspects}."
        log.info(
            "There are no other images to test with, so the training images are scored: "
            "anything marked is unusual even among them." + (unseen if suspects.is_dir() else "")
        )
        command = ["infer", *model, "--input", str(scored)]
    code = max(code, execute([*command, "--output", str(folder), *rest]))
    # One page: evaluate writes a report for the model, infer writes results.html.
    for page in (*folder.glob("*/report.html"), *folder.glob("results.html")):
        print(f"\nLook at {page.absolute()}")
        log.info(f"New images: anomaly infer {shlex.join(model)} --input FOLDER --output FOLDER")
        if not options.no_open:
            _open(page)
    if 1 < (usable := report.splits["train"].usable) < SMALL_SET:
        log.warning(
            f"only {usable} good images to learn from, so thresholds aren't reliable: give "
            f"{SMALL_SET} at least, better 300"
        )
    if code == 3:
        log.warning("exit code 3: files that can't be used were left out, as named above")
    if _wants_tuning(folder / "metrics.json"):
        code = max(code, execute(["tune", "--config", str(config), *settings, *rest]))
    return code


def _wants_tuning(figures: Path) -> bool:
    """True if defects pass, and the person at the terminal wants other settings tried."""
    if not figures.is_file():  # there were no test images
        return False
    (evaluated,) = from_json(figures.read_text("utf-8"))["categories"].values()
    escapes = (evaluated["verdicts"] or {}).get("escapes")
    return bool(escapes) and agrees("Try other settings?")


def _config_text(name: str, taken: Recognised, network: str | None, hints: Iterable[Advice]) -> str:
    """A config of the few settings that matter, as YAML.

    Args:
        name: the product's name.
        taken: the recognised layout.
        network: the backbone; None where --set names one.
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


def _network(settings: Sequence[str]) -> tuple[str | None, str]:
    """The backbone whose weights are at hand, and the reason; None where --set names one."""
    if any(setting.startswith("backbone.") for setting in settings):
        return None, ""
    from anomaly.backbones.networks import backbone_at_hand

    return backbone_at_hand()


def _name_of(folder: Path) -> str:
    place = at_home(folder).absolute()
    name = place.stem if place.suffix.lower() == LIST_SUFFIX else place.name
    return name.lstrip(".") or "model"
