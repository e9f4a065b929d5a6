"""What `infer` writes besides rows and heatmaps, on request."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly import __version__
from anomaly.cli import machine

if TYPE_CHECKING:
    import torch

    from anomaly.checkpoint import Model
    from anomaly.errors import OutputError
    from anomaly.journal import Journal
    from anomaly.pictures import Pictures
    from anomaly.results import Row

JOURNAL = "results.partial.jsonl"
WATCHED = "results.watched.jsonl"
DONE = "results.done.json"
OUTPUTS = (
    "results.csv",
    "results.jsonl",
    "results.parquet",
    "regions.csv",
    "parts.csv",
    "results.html",
    "heatmaps",
    "heatmap_scale.png",
    "masks",
    "maps",
    JOURNAL,
    WATCHED,
    DONE,
)


def ours(output: Path) -> list[Path]:
    """What is ours in an output folder: nothing of it is an input."""
    return [output / name for name in OUTPUTS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--heatmap",
        choices=("overlay", "side-by-side"),
        default="overlay",
        help="pictures of the image under its heatmap, or of image, heatmap and colour bar",
    )
    parser.add_argument(
        "--no-page", action="store_true", help="leave out results.html, the page over all images"
    )
    more = parser.add_argument_group("more to write")
    more.add_argument("--masks", action="store_true", help="masks/: what is marked, as PNG")
    more.add_argument(
        "--regions",
        action="store_true",
        help="regions.csv: bounding box, area and peak score of each marked region",
    )
    more.add_argument(
        "--maps",
        choices=("float32", "uint16"),
        help="maps/: anomaly maps, as float TIFF or as 16-bit PNG with a scale",
    )
    more.add_argument(
        "--parquet", action="store_true", help="results.parquet (needs the extra: parquet)"
    )


def check(options: argparse.Namespace) -> None:
    """See early that what is asked for can be written.

    Raises:
        OutputError: it can't.
    """
    from anomaly.errors import OutputError

    if options.parquet and importlib.util.find_spec("pyarrow") is None:
        raise OutputError("--parquet needs pyarrow: pip install 'anomaly[parquet]'")


def pictures(options: argparse.Namespace, model: Model) -> Pictures:
    """What is written for each image.

    Raises:
        OutputError: the model has no thresholds, which some of it needs.
    """
    from anomaly.errors import OutputError
    from anomaly.pictures import Pictures

    thresholds = model.detector.thresholds
    asked = {
        "--masks": options.masks,
        "--regions": options.regions,
        "--maps uint16": options.maps == "uint16",
    }
    needing = [name for name, wanted in asked.items() if wanted]
    if thresholds is None and needing:
        raise OutputError(
            f"{', '.join(needing)}: the model has no thresholds; train it without --no-calibrate"
        )
    limit = None if thresholds is None else thresholds.pixel
    return Pictures(
        options.output,
        limit,
        beside=model.detector.unit if options.heatmap == "side-by-side" else None,
        masks=options.masks,
        regions=options.regions,
        maps=options.maps,
    )


def write_scale(options: argparse.Namespace, model: Model) -> None:
    """Write what the heatmaps' colours mean, once: it is the same for every picture.

    Raises:
        OutputError: no room, no permission.
    """
    from anomaly.colour_bar import colour_bar
    from anomaly.files import write
    from anomaly.heatmap import encode_png
    from anomaly.pictures import SCALE

    thresholds = model.detector.thresholds
    if thresholds is not None:
        bar = colour_bar(480, thresholds.pixel, model.detector.unit)
        write(options.output / SCALE, encode_png(bar))


def about(options: argparse.Namespace, model: Model, device: torch.device) -> dict[str, object]:
    """What the rows of a run depend on, but for the images."""
    names = [n for n in ("masks", "regions", "parquet") if getattr(options, n)]
    return {
        "model": model.model_id,
        "software version": __version__,
        "device": str(device),
        "precision": model.detector.extractor.precision,
        "set of outputs": [options.heatmap, *names, *([options.maps] if options.maps else [])],
    }


def write_page(
    options: argparse.Namespace, model: Model, rows: Iterable[Row], facts: Mapping[str, object]
) -> str:
    """Write results.html, unless it isn't wanted; says so.

    Raises:
        OutputError: no room, no permission.
    """
    from anomaly.checkpoint import portable
    from anomaly.files import write
    from anomaly.report.gallery import PAGE, Run, gallery_html

    if options.no_page:
        return ""
    detector = model.detector
    run = Run(
        name=detector.config.name,
        unit=detector.unit,
        thresholds=detector.thresholds,
        model=str(options.model),
        model_id=model.model_id,
        inputs=", ".join(map(str, options.input or [options.list])),
        settings=portable(detector.config),
        facts=facts,
    )
    output = Path(options.output)
    write(output / PAGE, gallery_html(run, rows, output, machine.wanted_threads(options)))
    return f", all on one page in {output / PAGE}"


def write_tables(
    options: argparse.Namespace,
    journal: Journal,
    groups: Mapping[str, str],
    mm_per_pixel: float | None,
) -> OutputError | None:
    """Write the tables of a run; what was in the way, if anything."""
    from anomaly.errors import OutputError
    from anomaly.files import write
    from anomaly.parts import Part, judge_parts
    from anomaly.results import RegionRow, Row, as_csv, as_jsonl, as_parquet, region_rows

    rows, output = journal.rows(), Path(options.output)
    if not rows:
        return None
    try:
        write(output / "results.csv", as_csv(rows, Row))
        write(output / "results.jsonl", as_jsonl(rows))
        if options.parquet:
            write(output / "results.parquet", as_parquet(rows))
        if options.regions:
            found = [
                region
                for known in journal.in_order()
                for region in region_rows(known.row.path, known.regions, mm_per_pixel)
            ]
            write(output / "regions.csv", as_csv(found, RegionRow))
        if groups:
            write(output / "parts.csv", as_csv(judge_parts(rows, groups), Part))
    except OutputError as error:
        return error
    return None
