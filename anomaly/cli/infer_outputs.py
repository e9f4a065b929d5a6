"""What `infer` writes besides rows and heatmaps, on request."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly import __version__

if TYPE_CHECKING:
    import torch

    from anomaly.errors import OutputError
    from anomaly.inference.artifacts import Pictures
    from anomaly.inference.journal import Journal
    from anomaly.inference.rows import Row
    from anomaly.maps.thumbnails import Thumbnails
    from anomaly.model.detector import AnomalyDetector


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--heatmap",
        choices=("none", "reject", "all"),
        default="all",
        help="which images get one: none, those not called good (reject and review), or all "
        "(default)",
    )
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="heatmaps of image, heatmap and colour bar, with verdict and score",
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


def pictures(options: argparse.Namespace, model: AnomalyDetector) -> Pictures:
    """What is written for each image.

    Raises:
        OutputError: the model has no thresholds, which some of it needs.
    """
    from anomaly.errors import OutputError
    from anomaly.inference.artifacts import Pictures

    thresholds = model.thresholds
    asked = {
        "--masks": options.masks,
        "--regions": options.regions,
        "--maps uint16": options.maps == "uint16",
        "--heatmap reject": options.heatmap == "reject",
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
        review=None if thresholds is None else thresholds.review_pixel,
        beside=model.unit if options.side_by_side else None,
        masks=options.masks,
        regions=options.regions,
        maps=options.maps,
    )


def write_scale(options: argparse.Namespace, model: AnomalyDetector) -> None:
    """Write what the heatmaps' colours mean, once: it is the same for every picture.

    Raises:
        OutputError: no room, no permission.
    """
    from anomaly.files.own_outputs import SCALE
    from anomaly.files.writing import write
    from anomaly.maps.colour_bar import colour_bar
    from anomaly.maps.heatmap import encode_png

    thresholds = model.thresholds
    if thresholds is not None and options.heatmap != "none":
        bar = colour_bar(480, thresholds.pixel, model.unit, thresholds.review_pixel)
        write(options.output / SCALE, encode_png(bar))


def about(
    options: argparse.Namespace, model: AnomalyDetector, device: torch.device
) -> dict[str, object]:
    """What the rows of a run depend on, but for the images."""
    names = [n for n in ("side_by_side", "masks", "regions", "parquet") if getattr(options, n)]
    return {
        "model": model.model_id,
        "software version": __version__,
        "device": str(device),
        "engine": model.extractor.engine,
        "precision": model.extractor.precision,
        "set of outputs": [options.heatmap, *names, *([options.maps] if options.maps else [])],
    }


def write_page(
    options: argparse.Namespace,
    model: AnomalyDetector,
    rows: Iterable[Row],
    thumbnails: Thumbnails | None,
    facts: Mapping[str, object],
) -> str:
    """Write results.html, unless it isn't wanted: then there are no thumbnails. Says so.

    Raises:
        OutputError: no room, no permission.
    """
    from anomaly.files.own_outputs import PAGE
    from anomaly.files.writing import write
    from anomaly.model.settings import portable
    from anomaly.report.gallery import Run, gallery_html

    if thumbnails is None:
        return ""
    detector = model
    run = Run(
        name=detector.config.name,
        method=detector.method,
        unit=detector.unit,
        thresholds=detector.thresholds,
        model=str(options.model),
        model_id=model.model_id,
        inputs=", ".join(map(str, options.input or [options.list])),
        settings=portable(detector.config),
        facts=facts,
    )
    output = Path(options.output)
    write(output / PAGE, gallery_html(run, rows, output, thumbnails))
    return f", all on one page in {output / PAGE}"


def write_tables(
    options: argparse.Namespace,
    journal: Journal,
    groups: Mapping[str, str],
    mm_per_pixel: float | None,
) -> OutputError | None:
    """Write the tables of a run; what was in the way, if anything."""
    from anomaly.errors import OutputError
    from anomaly.files.writing import write
    from anomaly.inference.parts import Part, judge_parts
    from anomaly.inference.rows import RegionRow, Row, as_csv, as_jsonl, as_parquet, region_rows

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
