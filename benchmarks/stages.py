"""Processor time of `infer` by stage: milliseconds of one core an image.

Stages run one after another in one thread; medians. *The rest* is what a whole command takes for
each further image beside them: the processes that decode, rows, the journal, the page.
"""

from __future__ import annotations

import anomaly  # isort: skip  # noqa: F401, before torch, which reads once what it sets

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cv2
import torch

from anomaly.imaging.loading import by_shape, load
from anomaly.imaging.read import read_image
from anomaly.inference.outputs import PictureWriter, RenderOptions
from anomaly.runtime.parallel import use_threads
from anomaly.scoring.pipeline import Model
from anomaly.storage.load import load_model
from benchmarks.process import OURS

SCRIPT = Path(__file__).parents[1] / "scripts" / "infer.py"
Stages = dict[str, list[float]]


def table(folder: Path, files: Sequence[Path]) -> dict[str, float]:
    """Milliseconds an image of each stage, of the rest, and of all together."""
    model = load_model(folder, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as output:
        medians = {k: statistics.median(v) for k, v in _stages(model, files, Path(output)).items()}
    medians["scores, statistics"] -= sum(medians[k] for k in ("network", "embeddings", "search"))
    few = len(files) // 2  # advice on what is flagged costs the same of both
    further = _command(folder, files) - _command(folder, files[:few])
    whole = 1000 * further / (len(files) - few)
    return medians | {"the rest": whole - sum(medians.values()), "whole command": whole}


def _stages(model: Model, files: Sequence[Path], output: Path) -> Stages:
    spent: Stages = defaultdict(list)
    items = []
    for index, file in enumerate(files):
        with _clock(spent, "read and decode"):
            image = read_image(file)
        with _clock(spent, "resample"):
            items.append(load(index, image, model.loading))
    writer = PictureWriter(output)
    for batch in by_shape(items, model.batch_size):
        assert isinstance(batch, list)
        count = len(batch)
        with model.embedder.inference_mode():
            with _clock(spent, "network", count):
                maps = model.embedder.maps(batch)
            with _clock(spent, "embeddings", count):
                patches = model.scorer.align(maps)
            with _clock(spent, "search", count):
                model.scorer.score(patches)
        with _clock(spent, "scores, statistics", count):  # and those above, once more
            predictions = model.score(batch)
        for p in predictions:
            assert p.image is not None
            assert p.thresholds is not None
            limit, review = p.thresholds.pixel, p.thresholds.review_pixel
            render = RenderOptions(verdict=p.verdict, limit=limit, review=review)
            with _clock(spent, "draw, encode and write the heatmap"):
                writer.write(p.image, p.source_map, "heatmap.png", render)
    return spent


@contextmanager
def _clock(spent: Stages, stage: str, images: int = 1) -> Iterator[None]:
    start = time.thread_time()
    yield
    spent[stage] += [1000 * (time.thread_time() - start) / images] * images


def _command(folder: Path, files: Sequence[Path]) -> float:
    """Seconds of processor time of `infer`, with all processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as output:
        Path(output, "list.txt").write_text("\n".join(map(str, files)))
        command = [sys.executable, SCRIPT, "--model", folder, "--list", f"{output}/list.txt"]
        command += ["--output", f"{output}/out", "--device", "cpu"]
        environment = {k: v for k, v in os.environ.items() if k not in OURS}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def show(folder: Path, files: Sequence[Path]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    use_threads(1)
    cv2.setNumThreads(1)
    print("\n| stage | ms of a core an image |\n|---|---|")
    for stage, milliseconds in table(folder, files).items():
        print(f"| {stage} | {milliseconds:.1f} |", flush=True)
