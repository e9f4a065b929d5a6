"""`anomaly infer`: images -> results.csv, results.jsonl and heatmaps."""

from __future__ import annotations

import argparse
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly import __version__
from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine

if TYPE_CHECKING:
    from anomaly.checkpoint import Model
    from anomaly.detector import Prediction
    from anomaly.loading import Refused
    from anomaly.results import Row

OUTPUTS = ("results.csv", "results.jsonl", "heatmaps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", type=Path, required=True, help="the run's folder, or its model/ folder"
    )
    parser.add_argument(
        "--input", type=Path, nargs="+", required=True, help="image files and folders of them"
    )
    parser.add_argument("--output", type=Path, required=True, help="where results go")
    parser.add_argument("--overwrite", action="store_true", help="replace earlier results there")
    machine.add_precision(parser)
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Score images."""
    from anomaly.files import claim, write
    from anomaly.results import as_csv, as_jsonl, find_inputs, picture_names

    paths = find_inputs(options.input)
    claim(options.output, OUTPUTS, overwrite=options.overwrite)

    import torch

    from anomaly.checkpoint import load

    device, threads = machine.settle(options)
    assert isinstance(device, torch.device)
    model = load(options.model, device, options.precision)
    job = _Job(model, paths, picture_names(paths, options.input), options.output)
    interrupted = False
    try:
        job.run(threads)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        # Whatever stopped the run, the rows that exist are kept.
        rows = job.sorted_rows()
        if rows:
            write(options.output / "results.csv", as_csv(rows))
            write(options.output / "results.jsonl", as_jsonl(rows))
    _say(rows, len(paths), options.output)
    scored = sum(row.status == "ok" for row in rows)
    if interrupted:
        return 130
    return 0 if scored == len(paths) else 3 if scored else 2


class _Job:
    """One run: predictions come in on this thread, pictures are written behind it."""

    def __init__(self, model: Model, paths: list[Path], pictures: list[str], output: Path) -> None:
        self.model = model
        self.paths = paths
        self.pictures = pictures
        self.output = output
        self.rows: dict[int, Row] = {}

    def run(self, threads: int) -> None:
        from anomaly.loading import Refused

        with ProgressLine() as progress, ThreadPoolExecutor(threads) as pool:
            behind: deque[tuple[int, Row, Future[None]]] = deque()
            try:
                for result in self.model.detector.predict(self.paths, workers=threads):
                    if isinstance(result, Refused):
                        self.rows[result.index] = self._refused(result)
                    else:
                        future = pool.submit(self._draw, result)
                        behind.append((result.index, self._scored(result), future))
                    if len(behind) > 4 * threads:
                        self._settle(behind)
                    progress("scoring", len(self.rows) + len(behind), len(self.paths))
            finally:
                while behind:
                    self._settle(behind)

    def sorted_rows(self) -> list[Row]:
        return [self.rows[index] for index in sorted(self.rows)]

    def _settle(self, behind: deque[tuple[int, Row, Future[None]]]) -> None:
        """A row counts once its picture is on disk."""
        index, row, future = behind.popleft()
        future.result()
        self.rows[index] = row

    def _draw(self, result: Prediction) -> None:
        import numpy as np

        from anomaly.files import write
        from anomaly.heatmap import encode_png, heatmap

        thresholds = self.model.detector.thresholds
        limit = float(np.nanmax(result.patch_scores)) if thresholds is None else thresholds.pixel
        picture = heatmap(result.image, result.anomaly_map, limit)
        write(self.output / "heatmaps" / self.pictures[result.index], encode_png(picture))

    def _scored(self, result: Prediction) -> Row:
        thresholds = self.model.detector.thresholds
        score = result.image_score
        verdict = "" if thresholds is None else thresholds.verdict(score)
        if result.oddness:
            verdict = "review"
        return self._row(
            result.index,
            image_sha256=result.image.sha256,
            status="ok",
            image_score=score,
            verdict=verdict,
            heatmap=f"heatmaps/{self.pictures[result.index]}",
            reason=result.oddness,
        )

    def _refused(self, result: Refused) -> Row:
        return self._row(result.index, status=result.status, reason=result.reason)

    def _row(
        self,
        index: int,
        *,
        status: str,
        image_sha256: str = "",
        image_score: float | None = None,
        verdict: str = "",
        heatmap: str = "",
        reason: str = "",
    ) -> Row:
        from anomaly.results import Row

        thresholds = self.model.detector.thresholds
        return Row(
            path=str(self.paths[index]),
            image_sha256=image_sha256,
            status=status,
            image_score=image_score,
            threshold=None if thresholds is None else thresholds.image,
            verdict=verdict,
            heatmap=heatmap,
            model_id=self.model.model_id,
            software_version=__version__,
            threshold_label="" if thresholds is None else thresholds.label,
            reason=reason,
        )


def _say(rows: list[Row], total: int, output: Path) -> None:
    counts = {v: sum(row.verdict == v for row in rows) for v in ("good", "reject", "review")}
    scored = sum(row.status == "ok" for row in rows)
    review = f", {counts['review']} to review" if counts["review"] else ""
    print(
        f"{scored} of {total} images scored: {counts['good']} good, {counts['reject']} rejected"
        + review
    )
    for row in [row for row in rows if row.verdict == "review"][:5]:
        print(f"  review: {row.path}: {row.reason}")
    bad = [row for row in rows if row.status != "ok"]
    for row in bad[:5]:
        print(f"  {row.status}: {row.reason}")
    if len(bad) > 5:
        print(f"  … and {len(bad) - 5} more, all in results.csv")
    print(f"rows in {output / 'results.csv'}, pictures in {output / 'heatmaps'}")
