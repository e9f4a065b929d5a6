"""`anomaly export` and `features`: a model for another engine, with the proof that it is equal."""

from __future__ import annotations

import argparse
import logging
import random
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from anomaly.backbones.engine import ENGINES, Graph, installed
from anomaly.backbones.weights import check_weights
from anomaly.cli.common import chosen_device
from anomaly.cli.terminal import ProgressLine
from anomaly.datasets import Sample
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError, ModelError, OutputError, counted
from anomaly.evaluation.splits import TrainingImages, dataset_images
from anomaly.files.writing import as_json, claim, locked, locked_file, remove_drafts, write
from anomaly.imaging.loading import size_of
from anomaly.imaging.read import read_image
from anomaly.runtime import __version__, program_threads
from anomaly.scoring.model import Model, score
from anomaly.scoring.prediction import Prediction
from anomaly.storage.folder import (
    BACKBONE,
    EXPORT,
    HISTORY,
    MANIFEST,
    appearing,
    check_run_folder,
    claim_model,
    file_entry,
    find_model,
    write_sealed,
)
from anomaly.storage.load import config_in, exported_stages, load_model
from anomaly.training.runs import training_record

log = logging.getLogger(__name__)

_GOLDEN_COUNT = 16  # golden images drawn from the training images
_TOLERANCE = 1e-4  # largest difference of scores, as a share

VERDICTS = ("good", "review", "reject")  # as a graph from pixels counts them
# An image, what the export and the model say of it, whether that is the same, and the largest
# difference of a score, as a share of it.
Pair: TypeAlias = tuple[Path, str, str, bool, float]


def _export(options: argparse.Namespace) -> int:
    """Export a model, or report how the export differs."""
    folder = _checked(options)  # before torch is imported
    with locked(options.output):
        options.device = "cpu"
        chosen_device(options)
        with ProgressLine() as progress:
            exported = _written(options, folder, progress)
    equal, place = exported["equality"], options.output / "model"
    engine = f"{ENGINES[exported['engine']][0]} {exported['engine_version']}"
    print(f"exported model {exported['model_id']} for {engine}: {place}")
    print(
        f"compared with {equal['compared_with']}, on "
        f"{counted(len(equal['images']), 'golden image')}: same verdicts; scores differ by "
        f"{equal['largest_difference']:.1g} of their value at most"
    )
    model = shlex.quote(str(options.output))
    print(f"Use it: anomaly infer --model {model} --input FOLDER --output FOLDER")
    return 0


def _checked(options: argparse.Namespace) -> Path:
    """The model folder, where it can be exported with these options.

    Raises:
        ModelError: there is no model, it is an exported one, or the engine or what exporting needs
            isn't installed.
        DataError: a given folder has no images.
        OutputError: the output exists already, or the model itself would be overwritten.
    """
    folder, target = find_model(options.model, exported=False), options.output / "model"
    model, place = folder.resolve(), target.resolve()
    if place.is_relative_to(model) or model.is_relative_to(place):
        raise OutputError(f"{target} holds the model to export ({folder}); give another --output")
    check_run_folder(options.output)
    if (target / MANIFEST).is_file() and not (target / EXPORT).is_file():
        raise OutputError(
            f"{target} holds a trained model, which an export doesn't replace; give another "
            "--output"
        )
    claim_model(target, overwrite=options.overwrite)
    if options.golden is not None:
        find_inputs([options.golden], option="--golden")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"exporting needs {' and '.join(missing)}: pip install 'anomaly[export,{options.to}]'"
        )
    installed(options.to, "the model is compared in")
    return folder


def _written(
    options: argparse.Namespace, folder: Path, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Write a model for another engine, if it is equal on golden images.

    Args:
        options: of the command.
        folder: of the model.
        progress: called with (stage, done, total).

    Returns:
        The content of export.json.

    Raises:
        ModelError: the model can't be exported, or the export isn't equal; then `output` is
            unchanged.
        DataError: there are no images to compare on.
        OutputError: the disk is full.
    """
    # It imports torch; `_checked` refuses wrong options before.
    from anomaly.export.graph import OPSET, check_pixels, write_graph

    engine, camera, output = options.to, options.pixels, options.output
    remove_drafts(output)
    model = load_model(folder, "cpu", config_in(folder).precision)
    if camera:
        check_pixels(model)
    # Every engine and processor computes in fp32.
    reference = model
    if model.extractor.precision != "fp32":
        reference = replace(model, extractor=model.extractor.to("cpu", "fp32"))
    paths = golden_images(model, options.model, options.golden)
    with appearing(output / "model") as draft:
        progress("writing graphs", 0, 1)
        # All files of the model folder except the network.
        for name in (MANIFEST, *model.manifest["files"].keys() - {BACKBONE}):
            shutil.copyfile(folder / name, draft / name)
        if (folder / HISTORY).exists():
            shutil.copyfile(folder / HISTORY, draft / HISTORY)
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
        values["equality"] = equality(
            network_pairs(model, reference, exported, paths, partial(progress, "comparing")),
            "" if reference is model else "; train with --set precision=fp32",
        )
        if camera:
            graph = Graph(draft / values["whole"]["file"], engine, program_threads())
            whole = equality(pixel_pairs(reference, graph, paths, camera))
            values["equality"]["largest_whole_difference"] = whole["largest_difference"]
        write_sealed(draft / EXPORT, values)
    if record := training_record(options.model):  # where the data set is, for `evaluate`
        write(output / "train.json", as_json(record))
    return values


def golden_images(model: Model, folder: Path, given: Path | None) -> list[Path]:
    """The images for a comparison.

    Args:
        model: the model.
        folder: the run, or the model folder, that it was loaded from.
        given: a folder of images; None for training images, drawn with the seed.

    Raises:
        DataError: there are none.
    """
    if given is not None:
        return find_inputs([given], option="--golden").paths
    draw, present = random.Random(model.config.seed), list[Path]()
    with suppress(DataError):
        hashes = model.manifest["training_images"]
        training_images = TrainingImages(hashes, dataset_images(model, folder))
        for name in draw.sample(sorted(hashes), len(hashes)):
            if isinstance(sample := training_images.find(name), Sample):
                present.append(sample.path)
            if len(present) == _GOLDEN_COUNT:
                break
    if not present:
        raise DataError(
            f"{folder}: its training images have moved, so there are none to compare the export "
            f"on; give a folder of good and defective images with --golden"
        )
    return sorted(present)


def equality(pairs: Iterable[Pair], hint: str = "") -> dict[str, Any]:
    """The proof that an export says what its model says.

    Args:
        pairs: what both say of golden images.
        hint: what else there is to do where verdicts differ.

    Returns:
        The compared images and their largest difference, as in export.json.

    Raises:
        ModelError: an image differs; the message names it and the difference.
        DataError: there are no pairs.
    """
    shares: dict[Path, float] = {}
    for path, found, wanted, is_same, share in pairs:
        if not (share <= _TOLERANCE and is_same):
            raise ModelError(
                f"the export's scores differ: {path} has {found} in the export and {wanted} with "
                f"torch, a difference of {share:.2g} of the score (allowed: {_TOLERANCE:g}, and no "
                f"other verdict). Nothing was exported{hint}"
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
        "largest_whole_difference": None,
    }


def network_pairs(
    model: Model,
    reference: Model,
    exported: Model,
    paths: Sequence[Path],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Pair]:
    """What an exported model says of images, and the model as trained.

    Args:
        model: the source, in the number format of its training; verdicts are compared with its.
        reference: the source in fp32, in which exports compute; scores are compared with its.
        exported: the exported model.
        paths: images; a warning says how many can't be scored by either.
        progress: called with (images compared, all of them).
    """
    samples = [Sample(path, path.name) for path in paths]
    wanted = score(reference, samples)
    trained = wanted if reference is model else score(model, samples)
    unusable = 0
    found = score(exported, samples, progress=progress)
    for want, own, answer in zip(wanted, trained, found, strict=True):
        limits, share = model.thresholds, float("inf")
        if want.score is not None and answer.score is not None:
            share = _apart(answer.score, want.score, _scale(reference))
        elif want.status == answer.status:
            unusable += 1
            continue
        said, own_said = answer.verdict(exported.thresholds), own.verdict(limits)
        is_same = (said, bool(answer.reason)) == (own_said, bool(own.reason))
        both = _shown(answer.score, said), _shown(own.score, own_said)
        yield want.sample.path, *both, is_same, share
    if unusable:
        several = f"{unusable} of {len(paths)}"
        log.warning("%s golden images can't be scored and aren't compared", several)


def pixel_pairs(
    reference: Model, graph: Graph, paths: Sequence[Path], camera: tuple[int, int]
) -> Iterator[Pair]:
    """What a graph from pixels says of images, and the model.

    Args:
        reference: in fp32.
        graph: from pixels to the verdict.
        paths: images; those of another size than the camera's, or of more bits, are left out.
        camera: (H0, W0) that the graph takes.
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
        both = ((value, prediction.score), (shown, prediction.anomaly_map))
        share = max(_apart(found, wanted, _scale(reference)) for found, wanted in both)
        said = VERDICTS[int(code)], bool(reason)
        is_same = said == (prediction.verdict, bool(prediction.reason))
        texts = _shown(value, said[0]), _shown(prediction.score, prediction.verdict)
        yield path, *texts, is_same, share


def _apart(found: ArrayLike, wanted: ArrayLike, scale: float) -> float:
    """The largest difference, as a share of the highest value, or of `scale` if that is higher."""
    away = np.abs(np.subtract(found, wanted))
    return float(np.nanmax(away)) / max(float(np.nanmax(wanted)), scale)


def _scale(detector: Model) -> float:
    """Smallest score that differences are shares of: a training image may score 0."""
    return 1e-12 if detector.thresholds is None else max(detector.thresholds.review, 1e-12)


def _shown(score: float | None, verdict: str) -> str:
    return "no score" if score is None else f"score {score:.6g} ({verdict or 'no verdict'})"


def _features(options: argparse.Namespace) -> int:
    """Save features."""
    if "" in (options.layers or ()):
        raise AnomalyError("--layers has an empty name; name layers, such as layer3")
    if options.model is None:
        options.weights = options.weights or "imagenet"
        check_weights(options.weights)
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
    # Importing torch takes seconds, so options are checked before.
    from anomaly.export.features import from_backbone, from_model, save_features

    device = chosen_device(options)
    if options.model is None:
        source = from_backbone(options.backbone, options.weights, device, options.layers or None)
    else:
        source = from_model(options.model, device)
    with ProgressLine() as progress:
        refused = save_features(
            source,
            paths,
            options.output,
            pool=options.pool,
            progress=progress,
        )
    for each in refused:
        log.warning("left out: %s", each.reason)
    saved = counted(len(paths) - len(refused), "image")
    print(f"{saved} saved in {options.output}; layers: {', '.join(source.layers)}")
    return 3 if refused else 0


COMMANDS = {
    "export": _export,
    "features": _features,
}
