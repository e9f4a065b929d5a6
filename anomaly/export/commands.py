"""`anomaly export` and `features`: a model for another engine, with the proof that it is equal."""

from __future__ import annotations

import argparse
import logging
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anomaly.backbones.engine import ENGINES, Graph, installed
from anomaly.backbones.weights import check_weights
from anomaly.cli.common import chosen_device
from anomaly.cli.terminal import ProgressLine
from anomaly.datasets import Sample
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, ConfigError, DataError, ModelError, OutputError, counted
from anomaly.evaluation.splits import TrainingImages, dataset_images
from anomaly.export import VERDICTS
from anomaly.files.writing import as_json, claim, locked, locked_file, remove_drafts, write
from anomaly.imaging.arrays import as_numpy
from anomaly.imaging.loading import UnusableImage, by_shape, size_of, tile_by_tile
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import read_image
from anomaly.runtime import __version__, program_threads
from anomaly.scoring.model import Model, score
from anomaly.scoring.prediction import Prediction, Scored
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
)
from anomaly.storage.load import config_in, exported_stages, load_model, open_network, write_export
from anomaly.training.runs import training_record

if TYPE_CHECKING:
    from anomaly.training.fit import StageProgress  # with torch

log = logging.getLogger(__name__)

_GOLDEN_COUNT = 16  # golden images drawn from the training images
_TOLERANCE = 1e-4  # largest difference of scores, as a share
# Another one than the example that a graph is traced with, to detect one that was written into it.
_BATCH = 3


@dataclass(frozen=True)
class ExportOptions:
    """Choices for an export.

    Attributes:
        engine: a key of `anomaly.backbones.engine.ENGINES`.
        whole: whether to write a second graph, up to patch scores, for other programs.
        camera: (H0, W0) of the raw RGB images that the second graph takes and judges; None for
            network inputs.
        golden: a folder of images to compare on; None for training images.
        overwrite: replace an earlier export.
    """

    engine: str
    whole: bool = False
    camera: tuple[int, int] | None = None
    golden: Path | None = None
    overwrite: bool = False


def check_export(source: Path, output: Path, options: ExportOptions) -> Path:
    """Check that a model can be exported with these options; imports no torch.

    Returns:
        The model folder.

    Raises:
        ModelError: there is no model, it is an exported one, or the engine or what exporting needs
            isn't installed.
        DataError: a given folder has no images.
        OutputError: the output exists already, or the model itself would be overwritten.
    """
    folder = find_model(source, exported=False)
    _check_output(folder, output / "model", options.overwrite)
    if options.golden is not None:
        find_inputs([options.golden], option="--golden")
    config = config_in(folder)
    if options.whole and options.camera is None and config.model.smallest_defect is not None:
        log.warning(
            "the whole graph ends with patch scores: smallest_defect of this model applies when "
            "anomaly runs the export, not in other programs"
        )
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"exporting needs {' and '.join(missing)}: pip install 'anomaly[export,"
            f"{options.engine}]'"
        )
    installed(options.engine, "the model is compared in")
    return folder


def _check_output(folder: Path, target: Path, overwrite: bool) -> None:
    model, place = folder.resolve(), target.resolve()
    if place.is_relative_to(model) or model.is_relative_to(place):
        raise OutputError(f"{target} holds the model to export ({folder}); give another --output")
    check_run_folder(target.parent)
    if (target / MANIFEST).is_file() and not (target / EXPORT).is_file():
        raise OutputError(
            f"{target} holds a trained model, which an export doesn't replace; give another "
            "--output"
        )
    claim_model(target, overwrite=overwrite)


def export_model(
    source: Path,
    output: Path,
    options: ExportOptions,
    *,
    progress: StageProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write a model for another engine, if it is equal on golden images.

    Args:
        source: the run, or its model folder; `check_export` has passed it.
        output: a folder for `model/` and the run's facts of its training.
        options: engine, graphs, and images to compare on.
        progress: called with (stage, done, total).

    Returns:
        The content of export.json.

    Raises:
        ModelError: the model can't be exported, or the export isn't equal; then `output` is
            unchanged.
        DataError: there are no images to compare on.
        OutputError: the disk is full.
    """
    # They import torch; `check_export` refuses wrong options before.
    from anomaly.export.graph import OPSET, write_graph
    from anomaly.export.pixels import check_pixels

    folder, engine, camera = find_model(source), options.engine, options.camera
    remove_drafts(output)
    model = load_model(folder, "cpu", config_in(folder).precision)
    if camera is not None:
        check_pixels(model)
    # Every engine and processor computes in fp32.
    reference = model
    if model.extractor.precision != "fp32":
        reference = replace(model, extractor=model.extractor.to("cpu", "fp32"))
    paths = golden_images(model, source, options.golden)
    with appearing(output / "model") as draft:
        progress("writing graphs", 0, 1)
        # All files of the model folder except the network.
        for name in (MANIFEST, *model.manifest["files"].keys() - {BACKBONE}):
            shutil.copyfile(folder / name, draft / name)
        if (folder / HISTORY).exists():
            shutil.copyfile(folder / HISTORY, draft / HISTORY)
        entry, whole = write_graph(reference, draft, engine), None
        if options.whole:
            whole = write_graph(reference, draft, engine, whole=True, camera=camera)
        graphs = sorted([*draft.glob("network.*"), *draft.glob("whole.*")])
        values: dict[str, Any] = {
            "model_id": model.model_id,
            "network": entry,
            "whole": whole,
            "software_version": __version__,
            "engine": engine,
            "opset": OPSET,
            "files": {file.name: file_entry(file) for file in graphs},
        }
        progress("writing graphs", 1, 1)
        network = open_network(draft, model.manifest, values)
        exported = replace(model, **exported_stages(network, draft, model.config))
        values["engine_version"] = network.graph.version
        values["equality"] = compare(
            model,
            reference,
            exported,
            paths,
            progress=lambda done, total: progress("comparing", done, total),
        )
        if whole:
            graph = Graph(draft / whole["file"], engine, program_threads())
            share = compare_whole(reference, graph, paths, camera)
            values["equality"]["largest_whole_difference"] = share
        write_export(draft, values)
    if record := training_record(source):  # where the data set is, for `evaluate`
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


def compare(
    model: Model,
    reference: Model,
    exported: Model,
    paths: Sequence[Path],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Check that an exported model has torch's scores and the verdicts of the model as trained.

    Args:
        model: the source, in the number format of its training.
        reference: the source in fp32, in which exports compute; `model` itself if that is the same.
        exported: the exported model.
        paths: images.
        progress: called with (images compared, all of them).

    Returns:
        The compared images and their largest difference, as in export.json.

    Raises:
        ModelError: it differs; the message names the image and the difference.
        DataError: none of the images can be scored.
    """
    samples = [Sample(path, path.name) for path in paths]
    wanted = score(reference, samples)
    trained = wanted if reference is model else score(model, samples)
    scale = _scale(reference)
    names, shares = list[str](), list[float]()
    found = score(exported, samples, progress=progress)
    for sample, want, own, answer in zip(samples, wanted, trained, found, strict=True):
        share = _share(want, answer, scale)
        is_changed = _verdict(model, own) != _verdict(exported, answer)
        if not share <= _TOLERANCE or is_changed:
            hint = "" if own is want else "; train with --set precision=fp32"
            raise ModelError(
                f"the exported model's scores differ: {sample.path} has "
                f"{_described(exported, answer)} with {exported.extractor.engine} and "
                f"{_described(model, own)} with torch, a difference of {share:.2g} of the score "
                f"(allowed: {_TOLERANCE:g}, and no other verdict). Nothing was exported{hint}"
            )
        if answer.score is not None:
            names.append(sample.name)
            shares.append(share)
    if not shares:
        raise DataError(f"none of the golden images can be scored: {_described(model, wanted[0])}")
    if unusable := len(paths) - len(shares):
        several = f"{unusable} of {len(paths)}"
        log.warning("%s golden images can't be scored and aren't compared", several)
    return {
        "compared_with": f"torch {version('torch')}, fp32",
        "images": names,
        "tolerance": _TOLERANCE,
        "largest_difference": max(shares),
        "largest_difference_at": names[int(np.argmax(shares))],
        "largest_whole_difference": None,
    }


def compare_whole(
    reference: Model, graph: Graph, paths: Sequence[Path], camera: tuple[int, int] | None
) -> float:
    """Check that a whole graph says what a detector says.

    Args:
        reference: in fp32.
        graph: from images to patch scores or, with a camera, from pixels to the verdict.
        paths: images; with a camera those of another size aren't compared.
        camera: what the graph takes.

    Returns:
        The largest difference of a patch score, or of an image score and a map's value, as a share
        of the image's highest; or of the review threshold where that is higher.

    Raises:
        ModelError: one is too large, or a verdict differs; the message names the image.
        DataError: no image can be compared.
    """
    largest = -1.0
    if camera is None:
        compared = _compared_patches(reference, graph, paths)
    else:
        compared = _compared_pixels(reference, graph, paths, camera)
    for path, share, other_verdict in compared:
        if not share <= _TOLERANCE or other_verdict:
            raise ModelError(
                f"the whole graph's scores differ: {path} by {share:.2g} of the image's highest "
                f"score (allowed: {_TOLERANCE:g}){other_verdict}. Nothing was exported"
            )
        largest = max(largest, share)
    if camera is not None and largest < 0:
        raise DataError(
            f"none of {len(paths)} golden images has 8 bits and "
            f"{camera[1]}×{camera[0]} pixels, as in --pixels; give a folder of the "
            f"camera's images with --golden"
        )
    return largest


def _compared_patches(
    reference: Model, graph: Graph, paths: Sequence[Path]
) -> Iterator[tuple[Path, float, str]]:
    decoders = Decoders(reference.loading)
    loaded = reference.fitting(decoders.load_all(enumerate(paths)))
    for batch in tile_by_tile(by_shape(loaded, _BATCH), _BATCH):
        if isinstance(batch, UnusableImage):
            continue
        found = graph(np.stack([item.pixels for item in batch]).transpose(0, 3, 1, 2))[0]
        with reference.embedder.inference_mode():
            wanted = as_numpy(reference.scorer.score(reference.embedder(batch)).scores)
        for item, one, other in zip(batch, found, wanted, strict=True):
            yield paths[item.index], _apart(one, other, _scale(reference)), ""


def _compared_pixels(
    reference: Model, graph: Graph, paths: Sequence[Path], camera: tuple[int, int]
) -> Iterator[tuple[Path, float, str]]:
    fitting = [path for path in paths if size_of(path) == camera]
    for prediction in reference.results(fitting):
        if not isinstance(prediction, Prediction):
            continue
        path = fitting[prediction.index]
        pixels = read_image(path).pixels
        if pixels.dtype != np.uint8:
            continue
        codes, scores, reasons, maps, _ = graph(pixels[None])
        pairs = ((scores, np.array([prediction.score])), (maps[0], prediction.anomaly_map))
        share = max(_apart(found, wanted, _scale(reference)) for found, wanted in pairs)
        verdict, changed = VERDICTS[int(codes[0])], ""
        if (verdict, bool(reasons[0])) != (prediction.verdict, bool(prediction.reason)):
            changed = f"; verdict {verdict} instead of {prediction.verdict}"
        yield path, share, changed


def _apart(found: NDArray[Any], wanted: NDArray[Any], scale: float) -> float:
    """The largest difference, as a share of the highest value, or of `scale` if that is higher."""
    return float(np.nanmax(np.abs(found - wanted))) / max(float(np.nanmax(wanted)), scale)


def _scale(detector: Model) -> float:
    """Smallest score that differences are shares of: a training image may score 0."""
    return 1e-12 if detector.thresholds is None else max(detector.thresholds.review, 1e-12)


def _share(before: Scored, now: Scored, scale: float) -> float:
    if before.score is None or now.score is None:
        return 0.0 if before.score == now.score else float("inf")
    return _apart(np.array([now.score]), np.array([before.score]), scale)


def _verdict(detector: Model, scored: Scored) -> tuple[str, str, bool]:
    """The status, the verdict if there is one, and whether a person is given a reason to look."""
    return scored.status, scored.verdict(detector.thresholds), bool(scored.reason)


def _described(detector: Model, scored: Scored) -> str:
    if scored.score is None:
        return f"no score ({scored.reason})"
    return f"score {scored.score:.6g} ({scored.verdict(detector.thresholds) or 'no verdict'})"


def _export(options: argparse.Namespace) -> int:
    """Export a model, or report how the export differs."""
    if options.pixels and not options.whole:
        raise ConfigError("--pixels is for the whole graph; add --whole")
    wanted = ExportOptions(
        options.to,
        whole=options.whole,
        camera=options.pixels,
        golden=options.golden,
        overwrite=options.overwrite,
    )
    check_export(options.model, options.output, wanted)  # before torch is imported
    with locked(options.output):
        options.device = "cpu"
        chosen_device(options)
        with ProgressLine() as progress:
            exported = export_model(options.model, options.output, wanted, progress=progress)
    _print_export(exported, options.output / "model")
    return 0


def _print_export(values: dict[str, Any], folder: Path) -> None:
    """Print the facts of export.json."""
    equal = values["equality"]
    engine = f"{ENGINES[values['engine']][0]} {values['engine_version']}"
    print(f"exported model {values['model_id']} for {engine}: {folder}")
    print(
        f"compared with {equal['compared_with']}, on "
        f"{counted(len(equal['images']), 'golden image')}: same verdicts; scores differ by "
        f"{equal['largest_difference']:.1g} of their value at most"
    )
    print(
        f"Use it: anomaly infer --model {shlex.quote(str(folder.parent))} --input FOLDER --output "
        "FOLDER"
    )


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
