"""`anomaly check`: what a data set holds and what would go wrong, before any training."""

from __future__ import annotations

import argparse
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from anomaly.cli.terminal import ProgressLine
from anomaly.config.load import load_config
from anomaly.config.schema import Config
from anomaly.datasets import open_dataset
from anomaly.desk.check import DataReport, Fault, Reading, Severity, SplitSummary, check
from anomaly.errors import first_of
from anomaly.files.writing import write
from anomaly.report.page import region_page
from anomaly.scoring.build import decoding_of, region_of

_SHOWN = 5  # files of a fault
_COUNTED = 4  # names of a count
_HEADINGS = {
    "wrong": "training or evaluation would be wrong",
    "unusable": "can't be used as it is",
    "note": "worth knowing",
}


def run(options: argparse.Namespace) -> int:
    """Check a data set.

    Returns:
        0 all fine, 3 some files can't be used, 2 training or evaluation would be wrong.
    """
    config = load_config(options.config, options.overrides)
    if options.region is not None:
        return _draw_region(options.region, config)
    data = config.data
    dataset = open_dataset(data.format, data.root, data.category)
    with ProgressLine() as progress:
        report = check(dataset, reading_of(config), partial(progress, "reading"))
    print(as_text(report, dataset.folder, None if options.all else _SHOWN))
    if report.has(Severity.WRONG):
        return 2
    return 3 if report.has(Severity.UNUSABLE) else 0


def _draw_region(image: Path, config: Config) -> int:
    """Write a page on which polygons are drawn, and open it where somebody sits at the terminal."""
    page = region_page(image, decoding_of(config.image))
    output = Path(tempfile.mkdtemp(prefix="anomaly-")) / "region.html"
    write(output, page)
    print(f"draw in {output}, then copy the lines it shows into your config")
    if sys.stdout.isatty():
        webbrowser.open(output.as_uri())
    return 0


def reading_of(config: Config) -> Reading:
    """How settings say that images are read."""
    image, region = config.image, region_of(config.image, Path())
    return Reading(
        decoding_of(image),
        region,
        image.tile is not None,
        config.one_aspect,
    )


def as_text(report: DataReport, folder: Path, shown: int | None = _SHOWN) -> str:
    """A report, for people.

    Args:
        report: what `check` found.
        folder: the data set's.
        shown: how many faults of a kind are named; None for all.
    """
    lines = [str(folder)]
    for name, split in report.splits.items():
        lines += _split_lines(name, split)
    for severity, heading in _HEADINGS.items():
        faults = [fault for fault in report.faults if fault.severity == severity]
        if faults:
            lines += ["", f"{heading}: {len(faults)}", *_fault_lines(faults, shown)]
    return "\n".join(lines if report.faults else [*lines, "", "no faults"])


def _split_lines(name: str, split: SplitSummary) -> list[str]:
    images = split.good + split.defect
    fewer = f"; {split.usable} of these {images} can be used" if split.usable < images else ""
    return [
        f"  {name:<12}{split.good} good, {split.defect} defective{fewer}",
        f"  {'':<12}{_counts(split.sizes, 'sizes')}; {_counts(split.modes, 'kinds')}",
    ]


def _counts(counts: dict[str, int], what: str) -> str:
    if len(counts) == 1:
        return f"all {next(iter(counts))}"
    listed = ", ".join(f"{count} {name}" for name, count in list(counts.items())[:_COUNTED])
    return f"{len(counts)} {what}: {listed}" + (" …" if len(counts) > _COUNTED else "")


def _fault_lines(faults: Sequence[Fault], shown: int | None) -> list[str]:
    lines = []
    for kind in dict.fromkeys(fault.kind for fault in faults):
        details = [fault.detail for fault in faults if fault.kind == kind]
        lines += [f"  {kind}: {text}" for text in first_of(details, " (--all names them)", shown)]
    return lines
