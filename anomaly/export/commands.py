"""`anomaly export` and `features`: a model for another engine, with the proof that it is equal."""

from __future__ import annotations

import argparse
import logging
import random
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from anomaly.backbones.engine import ENGINES, Graph, import_engine
from anomaly.backbones.weights import weights_file
from anomaly.cli.terminal import ProgressLine
from anomaly.datasets.inputs import find_inputs
from anomaly.datasets.samples import Sample
from anomaly.errors import AnomalyError, DataError, ModelError, OutputError, counted
from anomaly.evaluation.evaluate import TrainingImages
from anomaly.files.writing import as_json, claim, locked, locked_file, remove_drafts, write
from anomaly.imaging.loading import size_of
from anomaly.imaging.read import read_image
from anomaly.runtime import __version__, device_of, program_threads
from anomaly.scoring.model import Model, Prediction, score
from anomaly.storage.folder import (
    BACKBONE,
    EXPORT,
    HISTORY,
    MANIFEST,
    appearing,
    check_model_folder,
    check_run_folder,
    file_entry,
    find_model,
    write_sealed,
)
from anomaly.storage.models import config_in, exported_stages, load_model
from anomaly.training.runs import training_record

log = logging.getLogger(__name__)

_GOLDEN_COUNT = 16  # golden images drawn from the training images
_TOLERANCE = 1e-4  # largest allowed difference of scores, as a share of the score

VERDICTS = ("good", "review", "reject")  # by the code that a graph from pixels puts out
Answer: TypeAlias = tuple[float | None, str, bool]  # score, verdict, True with a reason for review
# Image, answers of the export and of the model, and the largest difference of their scores as a
# share of the model's score.
Comparison: TypeAlias = tuple[Path, Answer, Answer, float]


def run_export(options: argparse.Namespace) -> int:
    """Export a model and print the proof that it is equal; the exit status is 0."""
    folder = _source_folder(options)  # before torch is imported
    with locked(options.output), ProgressLine() as progress:
        exported = _write_export(options, folder, progress)
    equality = exported["equality"]
    engine = f"{ENGINES[exported['engine']][0]} {exported['engine_version']}"
    print(f"exported model {exported['model_id']} for {engine}: {options.output / 'model'}")
    print(
        f"compared with {equality['compared_with']}, on "
        f"{counted(len(equality['images']), 'golden image')}: same verdicts; scores differ by "
        f"{equality['largest_difference']:.1g} of their value at most"
    )
    model = shlex.quote(str(options.output))
    print(f"Use it: anomaly infer --model {model} --input FOLDER --output FOLDER")
    return 0


def _source_folder(options: argparse.Namespace) -> Path:
    """The folder of the model to export; options that don't allow the export are refused."""
    folder, target = find_model(options.model, exported=False), options.output / "model"
    check_run_folder(options.output, folder)
    if (target / MANIFEST).is_file() and not (target / EXPORT).is_file():
        raise OutputError(
            f"{target} holds a trained model, which an export doesn't replace; give another "
            "--output"
        )
    check_model_folder(target, overwrite=options.overwrite)
    if options.golden is not None:
        find_inputs([options.golden], option="--golden")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"exporting needs {' and '.join(missing)}: pip install 'anomaly[export,{options.to}]'"
        )
    import_engine(options.to, "the model is compared in")
    return folder


def _write_export(
    options: argparse.Namespace, folder: Path, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Write a model for another engine; it stays only if it is equal on golden images.

    Returns:
        The content of export.json.
    """
    # It imports torch; `_source_folder` refuses wrong options before.
    from anomaly.export.graph import OPSET, check_pixels, write_graph

    engine, camera, output = options.to, options.pixels, options.output
    remove_drafts(output)
    model = load_model(folder, "cpu", config_in(folder).precision)
    if camera:
        check_pixels(model)
    # Exports compute in fp32, so their scores are compared with the model's in fp32.
    reference = model
    if model.extractor.precision != "fp32":
        reference = replace(model, extractor=model.extractor.to("cpu", "fp32"))
    paths = golden_images(model, options.golden)
    with appearing(output / "model") as draft:
        progress("writing graphs", 0, 1)
        # All files of the model folder but the network, which the graph replaces.
        for name in (MANIFEST, HISTORY, *model.manifest["files"].keys() - {BACKBONE}):
            if (folder / name).exists():
                shutil.copyfile(folder / name, draft / name)
        values: dict[str, Any] = {
            "model_id": model.model_id,
            "network": write_graph(reference, draft, engine),
            "whole": write_graph(reference, draft, engine, camera) if camera else None,
            "software_version": __version__,
            "engine": engine,
            "opset": OPSET,
        }
        graphs = sorted([*draft.glob("network.*"), *draft.glob("whole.*")])
        values["files"] = {file.name: file_entry(file) for file in graphs}
        progress("writing graphs", 1, 1)
        stages = exported_stages(draft, model.manifest, values, model.config)
        exported = replace(model, **stages)
        values["engine_version"] = stages["extractor"].graph.version
        values["equality"] = proven_equal(
            network_comparisons(model, reference, exported, paths, partial(progress, "comparing")),
            "" if reference is model else "; train with --set precision=fp32",
        )
        if camera:
            graph = Graph(draft / values["whole"]["file"], engine, program_threads())
            comparisons = pixel_comparisons(reference, graph, paths, camera)
            values["whole_equality"] = proven_equal(comparisons)
        write_sealed(draft / EXPORT, values)
    if record := training_record(options.model):  # where the data set is, for `evaluate`
        write(output / "train.json", as_json(record))
    return values


def golden_images(model: Model, given: Path | None) -> list[Path]:
    """The images that an export is compared on.

    Args:
        model: the model to export.
        given: a folder of images; None for 16 training images at most, drawn with the seed.

    Raises:
        DataError: none of the training images is where it was, and no folder is given.
    """
    if given is not None:
        return find_inputs([given], option="--golden").paths
    present: list[Path] = []
    training_images, names = TrainingImages(model), sorted(model.manifest["training_images"])
    for name in random.Random(model.config.seed).sample(names, len(names)):
        if sample := training_images.find(name):
            present.append(sample.path)
        if len(present) == _GOLDEN_COUNT:
            break
    if not present:
        raise DataError(
            f"{model.folder}: its training images have moved, so there are none to compare the "
            "export on; give a folder of good and defective images with --golden"
        )
    return sorted(present)


def proven_equal(comparisons: Iterable[Comparison], hint: str = "") -> dict[str, Any]:
    """Prove that an export gives its model's verdicts, and its scores but for 0.01 %.

    Args:
        comparisons: scores and verdicts of both on golden images.
        hint: remedy for a difference, at the end of the message.

    Returns:
        The compared images and their largest difference, as in export.json.

    Raises:
        ModelError: an image differs; the message names it and the difference.
        DataError: there are no comparisons.
    """
    shares: dict[Path, float] = {}
    for path, exported, expected, share in comparisons:
        # A NaN is too large a difference, too.
        if not share <= _TOLERANCE or exported[1:] != expected[1:]:
            raise ModelError(
                f"the export's scores differ: {path} has {_shown(exported)} in the export and "
                f"{_shown(expected)} with torch, a difference of {share:.2g} of the score "
                f"(allowed: {_TOLERANCE:g}, and no other verdict). Nothing was exported{hint}"
            )
        shares[path] = share
    if not shares:
        raise DataError(
            "none of the golden images can be compared: each must be readable and, with --pixels, "
            "have 8 bits and the camera's size. Give a folder of such images with --golden"
        )
    worst = max(shares, key=shares.__getitem__)
    return {
        "compared_with": f"torch {version('torch')}, fp32",
        "images": [path.name for path in shares],
        "tolerance": _TOLERANCE,
        "largest_difference": shares[worst],
        "largest_difference_at": worst.name,
    }


def network_comparisons(
    model: Model,
    reference: Model,
    exported: Model,
    paths: Sequence[Path],
    progress: Callable[[int, int], None],
) -> Iterator[Comparison]:
    """Scores and verdicts of an exported model and of its source, image by image.

    Args:
        model: the source in the precision of its training, whose verdicts count.
        reference: the source in fp32, the precision of exports, whose scores count.
        exported: the exported model.
        paths: images; a warning counts those that neither model can score.
        progress: called with (done, total).
    """
    samples = [Sample(path, path.name) for path in paths]
    in_fp32 = score(reference, samples)
    as_trained = in_fp32 if reference is model else score(model, samples)
    answers = score(exported, samples, progress=progress)
    unusable = 0
    for expected, trained, answer in zip(in_fp32, as_trained, answers, strict=True):
        share = float("inf")  # stays where only one of the two can score the image
        if expected.score is not None and answer.score is not None:
            share = _relative_difference(answer.score, expected.score, reference)
        elif expected.status == answer.status:
            unusable += 1
            continue
        by_model = trained.score, trained.verdict(model.thresholds), bool(trained.reason)
        by_export = answer.score, answer.verdict(exported.thresholds), bool(answer.reason)
        yield expected.sample.path, by_export, by_model, share
    if unusable:
        log.warning(
            "%d of %d golden images can't be scored and aren't compared", unusable, len(paths)
        )


def pixel_comparisons(
    reference: Model, graph: Graph, paths: Sequence[Path], camera: tuple[int, int]
) -> Iterator[Comparison]:
    """Scores and verdicts of a graph from pixels and of its model, image by image.

    Args:
        reference: the model in fp32.
        graph: camera pixels -> verdict.
        paths: images; other sizes than the camera's and more than 8 bits are left out.
        camera: (H0, W0) of the images that the graph takes.
    """
    fitting = [path for path in paths if size_of(path) == camera]
    for prediction in reference.results(fitting):
        if not isinstance(prediction, Prediction):
            continue
        path = fitting[prediction.index]
        pixels = read_image(path).pixels
        if pixels.dtype != np.uint8:
            continue
        (code,), (value,), (reason,), (shown,), _ = graph(pixels[None])
        share = max(
            _relative_difference(value, prediction.score, reference),
            _relative_difference(shown, prediction.anomaly_map, reference),
        )
        by_model = prediction.score, prediction.verdict, bool(prediction.reason)
        yield path, (value, VERDICTS[int(code)], bool(reason)), by_model, share


def _relative_difference(values: ArrayLike, expected: ArrayLike, reference: Model) -> float:
    """The largest difference as a share of the highest score, or of a higher review threshold.

    Infinite where only one has a value; NaN is where nothing was inspected.
    """
    if (np.isnan(values) != np.isnan(expected)).any():
        return float("inf")
    differences = np.abs(np.subtract(values, expected))
    # A training image may score 0, or close to it: the threshold keeps shares of it small.
    least = 0.0 if reference.thresholds is None else reference.thresholds.review
    return float(np.nanmax(differences)) / max(float(np.nanmax(expected)), least, 1e-12)


def _shown(answer: Answer) -> str:
    """Score and verdict in words."""
    score, verdict, _ = answer
    return "no score" if score is None else f"score {score:.6g} ({verdict or 'no verdict'})"


def run_features(options: argparse.Namespace) -> int:
    """Save features of images; the exit status is 0, or 3 where some couldn't be used."""
    if "" in (options.layers or ()):
        raise AnomalyError("--layers has an empty name; name layers, such as layer3")
    if options.model is None:
        options.weights = options.weights or "imagenet"
        weights_file(options.weights)  # refuses a wrong path before torch is imported
    else:
        for name in ("layers", "weights"):
            if getattr(options, name):
                raise AnomalyError(f"--{name} needs --backbone; a model already has it")
        find_model(options.model, exported=False)
    if options.output.suffix != ".npz":
        raise AnomalyError(f"--output {options.output} must end in .npz")
    paths = find_inputs(options.input).paths
    with locked_file(options.output):
        claim(options.output.parent, [options.output.name], overwrite=options.overwrite)
        return _save_features(options, paths)


def _save_features(options: argparse.Namespace, paths: Sequence[Path]) -> int:
    """Save features of images, print their number, and return the exit status."""
    # Imports torch, which takes seconds: options were checked before.
    from anomaly.export.features import from_backbone, from_model, save_features

    device = device_of("auto")
    if options.model is None:
        source = from_backbone(options.backbone, options.weights, device, options.layers or None)
    else:
        source = from_model(options.model, device)
    with ProgressLine() as progress:
        refused = save_features(source, paths, options.output, pool=options.pool, progress=progress)
    for image in refused:
        log.warning("left out: %s", image.reason)
    saved = counted(len(paths) - len(refused), "image")
    print(f"{saved} saved in {options.output}; layers: {', '.join(source.layers)}")
    return 3 if refused else 0
