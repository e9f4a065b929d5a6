"""`anomaly start`, `anomaly check` and `anomaly demo`: from images to a model and a page."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from anomaly.cli import execute
from anomaly.cli.terminal import ProgressLine, command_line, is_interactive
from anomaly.config.load import load_config, parse_config
from anomaly.config.schema import METHODS, Config, readers
from anomaly.datasets.inputs import listing_of
from anomaly.datasets.layouts import LIST_SUFFIX, Recognised, open_dataset, recognise
from anomaly.datasets.samples import Dataset
from anomaly.desk.check import DataReport, Hint, Reading, Severity, check, pose_hints, setting_hints
from anomaly.desk.demo import write_sample_data
from anomaly.errors import DataError, OutputError
from anomaly.files.writing import at_home, claim, locked, write
from anomaly.report.page import region_page
from anomaly.scoring.build import decoding_of, region_of
from anomaly.storage.folder import check_run_folder

log = logging.getLogger(__name__)

_SHOWN = 5  # files that `start` names for each kind of fault
# The demo's data set, and the built-in config that names it.
_DATA, _CONFIG = Path("data/sample/brushed_plate"), Path("sample_brushed_plate.yaml")


def run_check(options: argparse.Namespace) -> int:
    """Check a data set, or with --region open a page to draw the region to inspect.

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
    """Generate sample images, train on them, infer and evaluate; earlier results are replaced.

    Returns:
        0, or the exit code of the first of these commands that ends with another one.
    """
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
    """Recognise and check a data set, train and test a model, and show the page.

    Returns:
        The highest exit code of these commands.
    """
    named = {"name": options.name or _name_of(options.folder)}
    settings = parse_config(named, "--name", options.overrides)
    output = options.output or Path("runs") / settings.name
    config = output / f"{settings.name}.yaml"
    set_again = [part for override in options.overrides for part in ("--set", override)]
    common = ["--device", options.device, *(["--overwrite"] if options.overwrite else [])]
    with locked(output):  # the commands that follow work within this lock
        source, dataset, report = _prepare(options, settings, output, config)
        given = ["--config", str(config), *set_again]
        log.info("\n$ anomaly %s", command_line(["check", *given]))
        single = _show_faults(dataset, report)
        train = ["train", *given, "--output", str(output), *single, *common]
        code = execute(train, reported={fault.detail for fault in report.faults})
        if code not in (0, 3):  # 3: trained without some unusable images
            return code
        if dataset.test:
            folder, command = output / "evaluation", ["evaluate"]
        else:
            folder, command = output / "results", ["infer", "--input", str(source.root)]
            log.info(
                "There are no other images to test with, so the training images are scored: "
                "anything marked is unusual even among them."
            )
            if (suspects := output / "suspects").is_dir():
                log.info(f"Those that looked most unusual in training are in {suspects}.")
        model = ["--model", str(output)]
        code = max(code, execute([*command, *model, "--output", str(folder), *common]))
    # evaluate writes one report for the model, infer writes results.html.
    for page in (*folder.glob("*/report.html"), *folder.glob("results.html")):
        print(f"\nLook at {page.absolute()}")
        log.info(f"New images: anomaly infer {shlex.join(model)} --input FOLDER --output FOLDER")
        if not options.no_open:
            _open(page)
    if code == 3:
        log.warning("exit code 3: files that can't be used were left out, as named above")
    return code


def _name_of(folder: Path) -> str:
    """A run's name, from the folder or the list of its images."""
    place = at_home(folder).absolute()
    name = place.stem if place.suffix.lower() == LIST_SUFFIX else place.name
    return name.lstrip(".") or "model"


def _prepare(
    options: argparse.Namespace, settings: Config, output: Path, config: Path
) -> tuple[Recognised, Dataset, DataReport]:
    """Recognise the data set, check its images, and write the settings that suit it.

    Args:
        options: the command's options.
        settings: the defaults, with the name and each --set.
        output: the run's folder.
        config: the YAML file to write.

    Returns:
        The layout and place of the data set, its samples, and its faults.
    """
    source = recognise(options.folder, options.format, input if is_interactive() else None)
    check_run_folder(output)
    claim(output, ("model",), overwrite=options.overwrite)
    if config.exists() and not options.overwrite:  # somebody may have changed it
        train = ["train", "--config", str(config), "--output", str(output)]
        raise OutputError(
            f"{config} exists from an earlier start; use it with `anomaly {shlex.join(train)}`, or "
            "add --overwrite to write it anew"
        )
    log.info(f"{options.folder} is read as --format {source.layout}: {source.reason}")
    listing = output.absolute() / "images.csv"
    if source.listing:
        write(listing, source.listing)
        log.info(f"they are listed in {listing}")
        source = replace(source, root=listing)
    network = _network(options.overrides)
    source, dataset, report = _check_images(source, settings, listing)
    data = {"format": source.layout, "root": str(source.root)}
    values: dict[str, Any] = {"name": settings.name, "data": data, **network}
    for hint in _fitting_hints(options.overrides, settings, dataset, report):
        log.info(f"- {hint.reason} ({hint.key}: {hint.value})")
        section, _, key = hint.key.partition(".")
        values.setdefault(section, {})[key] = hint.value
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    about = "# Written by `anomaly start`. The documentation (Settings) has all keys."
    write(config, f"{about}\n{text}")
    log.info(f"the settings are in {config}; edit them if you know better")
    # The written settings have image.bit_depth, and evaluate will tell of missing masks.
    faults = tuple(fault for fault in report.faults if fault.kind not in ("bit_depth", "no_masks"))
    return source, dataset, replace(report, faults=faults)


def _network(overrides: Sequence[str]) -> dict[str, Any]:
    """The network whose weights are at hand, as settings; none if --set has a key of `backbone`."""
    if any(override.startswith("backbone.") for override in overrides):
        return {}
    from anomaly.backbones.networks import backbone_at_hand  # imports torch

    name, why = backbone_at_hand()
    log.info(f"the network is {name}: {why}")
    return {"backbone": {"name": name, "weights": "imagenet"}}


def _check_images(
    source: Recognised, settings: Config, listing: Path
) -> tuple[Recognised, Dataset, DataReport]:
    """Open and check a data set; where a drawn split would part copies, it is listed anew.

    Args:
        source: the recognised layout.
        settings: preprocessing of the images.
        listing: CSV file for the new split.

    Returns:
        The layout now, the data set, and the report on it.
    """
    dataset = open_dataset(source.layout, source.root, None)
    reading = _reading(settings)
    reading = replace(reading, tiled=reading.tiled or _tileable(settings))
    with ProgressLine() as progress:
        report = check(dataset, reading, partial(progress, "looking"))
    if not report.splits["train"].usable:
        raise DataError(next(f.detail for f in report.faults if f.kind == "too_few_images"))
    learned = {sample.name for sample in dataset.train}
    parted = any(0 < len(learned & {*names}) < len(names) for names in report.copies)
    if dataset.drawn and parted:
        write(listing, listing_of(dataset, report.copies))
        log.info(
            "copies of one image are kept together, all for training or all for testing; see "
            f"{listing}"
        )
        return _check_images(replace(source, layout="csv", root=listing), settings, listing)
    if dataset.drawn:
        good = sum(not sample.is_defect for sample in dataset.test)
        total = good + len(dataset.train)
        log.info(f"- {good} of {total} good images are kept for testing, not for training")
    return source, dataset, report


def _fitting_hints(
    overrides: Sequence[str], settings: Config, dataset: Dataset, report: DataReport
) -> Iterator[Hint]:
    """Hint on settings that the method reads; on alignment only if --set leaves it open.

    Args:
        overrides: the values of --set, such as `image.align=none`.
        settings: the defaults, with these overrides.
        dataset: training images, which show how parts lie.
        report: sizes and bits of the images.
    """
    kind, settled = settings.model.kind, list(overrides)
    for hint in setting_hints(report):
        is_read = kind in (readers(hint.key) or [kind])
        if is_read and (hint.key != "image.tile" or _tileable(settings)):
            settled.append(hint.key)
            yield hint
    if not any(key.startswith(("image.align", "image.tile")) for key in settled):
        one_grid = METHODS[kind].one_grid
        yield from pose_hints(dataset.train, decoding_of(settings.image), one_grid=one_grid)


def _tileable(settings: Config) -> bool:
    """True if images may be cut into tiles: neither resized nor learned position by position."""
    return settings.image.resize is None and not METHODS[settings.model.kind].one_grid


def _show_faults(dataset: Dataset, report: DataReport) -> list[str]:
    """Print the faults of a data set.

    Returns:
        The option without which training on a single image would be refused; else none.

    Raises:
        DataError: a picture has two labels: training or evaluation would be refused.
    """
    print("\n".join([str(dataset.folder), *report.lines(_SHOWN)]))
    for fault in report.faults:
        if fault.kind == "two_labels":
            raise DataError(fault.detail)
    if report.splits["train"].usable > 1:
        return []
    log.info("one image can't show how good parts vary, so there are no thresholds and no verdicts")
    return ["--no-calibrate"]
