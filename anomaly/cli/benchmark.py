"""`anomaly benchmark`: milliseconds by stage on this machine, and whether a budget holds."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from anomaly.cli.common_options import device_and_threads
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError
from anomaly.evaluation.splits import dataset_images
from anomaly.files.outputs import JOURNAL
from anomaly.files.tables import text_table
from anomaly.files.writing import as_json, write
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.listing import list_images
from anomaly.imaging.loading import Preprocessing
from anomaly.imaging.read import read_image
from anomaly.inference.journal import RunJournal
from anomaly.inference.outputs import Outputs
from anomaly.inference.run import Inputs, infer
from anomaly.maps.heatmap import encode_png
from anomaly.runtime.devices import has_bf16, peak_memory
from anomaly.runtime.parallel import cores
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import find_model
from anomaly.storage.golden import golden_of
from anomaly.storage.load import load_model
from anomaly.training.runs import training_record

log = logging.getLogger(__name__)

_HEAD = "{engine} in {precision}, {threads} threads; {parts} parts, {images}"
_FOOT = """\
the stages add up to {sum_of_stages:.2f} times the measured time of a part
{parts_per_second:.1f} parts a second when several are computed at once
{cold_start_seconds:.1f} s from process start to the first verdict, peak {gigabytes:.2f} GB"""
_STAGES = ("read", "network input", "network", "search", "map", "draw", "row")  # in their order
_PERCENTILES = (50, 95, 99)
_WARM, _LEAST, _MOST = 3, 20, 200  # parts that aren't counted, and that are


def run(options: argparse.Namespace) -> int:
    """Measure; returns 1 where the budget doesn't hold with any engine, else 0."""
    device, threads = device_and_threads(options)
    model = load_model(options.model, device)
    how = ["--threads", threads, "--device", options.device]
    with tempfile.TemporaryDirectory(prefix="anomaly-") as scratch:
        paths, source = _images(options, model, Path(scratch))
        cold = ["--model", options.model, "--input", paths[0], "--output", f"{scratch}/cold", *how]
        begun, network = time.perf_counter(), model.extractor
        _anomaly("infer", "--no-page", *cold)
        facts = {"cold_start_seconds": time.perf_counter() - begun, "images": source}
        facts |= {"engine": network.engine, "precision": network.precision, "threads": threads}
        measured = [facts | _measure(model, paths, Path(scratch), threads)]
        for engine in options.engine:  # each in a process of its own, for its memory
            output, images = f"{scratch}/{engine}", ["--images", *paths, *how]
            _anomaly("export", "--model", options.model, "--to", engine, "--output", output)
            measured += json.loads(_anomaly("benchmark", "--json", "--model", output, *images))
    print(as_json(measured) if options.json else "\n\n".join(map(_shown, measured)))
    return 0 if options.budget is None else _judge(model, options, measured)


def _judge(model: Model, options: argparse.Namespace, measured: list[dict[str, Any]]) -> int:
    """Say whether the budget holds, and what helps; returns 1 where it holds with no engine."""
    budget, late, say = 1000 * options.budget, True, log.debug if options.json else log.info
    for figures in measured:
        *_, took = figures["milliseconds"]["whole part"]
        late, word = late and took > budget, "doesn't hold" if took > budget else "holds"
        say(f"{figures['engine']}: {budget:g} ms a part {word}, 99 % take {took:g} ms at most")
    for line in _advice(model, options.model, measured[0], budget) if late else ():
        say(f"- {line}")
    return int(late)


def _measure(model: Model, paths: list[Path], folder: Path, workers: int) -> dict[str, Any]:
    """Have `infer` score parts, one by one and then many at once; its functions are watched."""
    spent: defaultdict[str, float] = defaultdict(float)
    stages = {stage: list[float]() for stage in (*_STAGES, "whole part")}
    model = replace(model)  # the caller's stays as it is
    with (
        Decoders(workers, Task(model.loading, Outputs(folder).pictures(model))) as decoders,
        RunJournal(folder / JOURNAL, {}) as journal,
    ):
        for owner, name, stage in (
            (decoders, "submit", "load"),
            (model, "embedded", "network"),
            (model, "score_patches", "search and map"),
            (model, "image_scores_of", "map"),
            (decoders, "finish", "draw"),
            (journal, "add", "row"),
        ):
            timed = _timed(spent, stage, getattr(owner, name), model.device.type == "cuda")
            object.__setattr__(owner, name, timed)
        end = time.perf_counter() + 20.0
        for number in range(-_WARM, _MOST):
            if number >= _LEAST and time.perf_counter() > end:
                break
            path = paths[number % len(paths)]
            read = decoders.call(_seconds_to_read, path, model.loading, about=path)
            spent.clear()
            begun = time.perf_counter()
            infer(model, Inputs([path], [f"{number}.png"]), journal, decoders)
            took = time.perf_counter() - begun
            if (row := journal.done.pop(0).row).status != "ok":
                raise DataError(f"it can't be measured: {row.reason}")
            while "draw" not in spent:  # noted a moment after the run has its answer
                time.sleep(0)
            spent["read"], spent["network input"] = read, max(0.0, spent["load"] - read)
            spent["search"], spent["whole part"] = spent["search and map"] - spent["map"], took
            for stage, times in stages.items() if number >= 0 else ():
                times.append(1000 * spent[stage])
        memory, whole = peak_memory() + decoders.resident, stages["whole part"]
        many = Inputs((paths * len(whole))[: len(whole)], [f"{i}.png" for i in range(len(whole))])
        begun = time.perf_counter()
        infer(model, many, journal, decoders)
        took = time.perf_counter() - begun
    return {
        "parts": len(whole),
        "milliseconds": {
            stage: np.percentile(times, _PERCENTILES, method="higher").round(2).tolist()
            for stage, times in stages.items()
        },
        "sum_of_stages": sum(sum(stages[stage]) for stage in _STAGES) / sum(whole),
        "parts_per_second": len(whole) / took,
        "memory_bytes": memory,
    }


def _timed(spent: dict[str, float], stage: str, function: Any, on_gpu: bool) -> Any:
    """A function that notes what it, or the process that it asks, takes."""

    def call(*arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()

        def note(_: object) -> None:
            spent[stage] += time.perf_counter() - begun

        result = function(*arguments, **named)
        if isinstance(result, Future):
            result.add_done_callback(note)
            return result
        if on_gpu:  # which goes on by itself
            sys.modules["torch"].cuda.synchronize()
        note(result)
        return result

    return call


def _seconds_to_read(path: Path, loading: Preprocessing) -> float:
    """What reading and decoding a file takes in a decoding process."""
    begun = time.perf_counter()
    read_image(path, max_pixels=loading.max_pixels, bit_depth=loading.bit_depth)
    return time.perf_counter() - begun


def _anomaly(*words: object) -> str:
    """What a command prints in a fresh process."""
    command = [sys.executable, "-m", "anomaly", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AnomalyError(f"anomaly {words[0]} has failed: {done.stderr.strip()}")
    return done.stdout


def _images(options: argparse.Namespace, model: Model, scratch: Path) -> tuple[list[Path], str]:
    """What to measure with, and what that is in words."""
    folder, image = find_model(options.model), model.config.image
    if options.images:
        return find_inputs(options.images, option="--images").paths, "images given"
    if (golden := golden_of(folder)) and (parts := list_images(golden)):
        return parts, f"golden parts in {golden}"
    with suppress(AnomalyError, OSError):
        samples = dataset_images(model, folder, None)[:_MOST]
        return [sample.path for sample in samples], "images of the data set it was trained on"
    # As many pixels as a patch of the network stands for in the training images.
    patch = training_record(folder).get("patch_size", {}).get("pixels", (8.0, 8.0))[0]
    side = round(image.area * patch / min(model.extractor.strides))
    noise = cv2.GaussianBlur(np.random.default_rng(0).random((side, side, 3)), (0, 0), 3)
    write(scratch / "noise.png", encode_png((255 * noise).astype(np.uint8)))
    return [scratch / "noise.png"], f"blurred noise of {side}×{side}: give --images for real parts"


def _shown(figures: dict[str, Any]) -> str:
    times = figures["milliseconds"]
    rows = [[stage, *map("{:.1f}".format, times[stage])] for stage in times]
    table = text_table([["milliseconds", *map("{} % within".format, _PERCENTILES)], *rows])
    values = figures | {"gigabytes": figures["memory_bytes"] / 1e9}
    return "\n".join([_HEAD, *table, _FOOT]).format(**values)


def _advice(model: Model, name: Path, figures: Mapping[str, Any], budget: float) -> Iterator[str]:
    """What would make a part faster, by the stages that take long."""
    took = {stage: half for stage, (half, *_) in figures["milliseconds"].items()}
    whole, config, network = took.pop("whole part"), model.config, model.extractor
    slow = network.engine == "torch" and model.device.type == "cpu"
    bf16 = slow and network.precision == "fp32" and has_bf16(model.device)
    changes = {
        "network": ["train with --set precision=bf16"] * bf16
        + [f"anomaly export --model {name} --to openvino --output FOLDER"] * slow
        + [f"train with a smaller image.area than {config.image.area}"],
        "search": [f"train with a smaller model.coreset_ratio than {config.model.coreset_ratio:g}"]
        * (config.model.kind == "patchcore"),
        "read": ["let the camera write smaller files"],
        "draw": ["draw flagged parts only: anomaly infer --heatmap reject"],
    }
    if whole <= budget:
        yield f"half of the parts take at most {whole:g} ms: check what else runs on this machine"
    if figures["threads"] < cores():
        yield f"use all {cores()} processors: leave --threads off"
    for stage in sorted(changes, key=lambda stage: -took[stage]):
        for change in changes[stage] if took[stage] > 0.15 * whole else ():
            yield f"{stage} takes {took[stage]:.0f} of {whole:.0f} ms: {change}"
