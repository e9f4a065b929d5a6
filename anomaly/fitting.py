"""Images as a Python program has them -> a trained detector. The command is `anomaly train`."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from anomaly.config.load import parse_config
from anomaly.config.schema import Config
from anomaly.datasets import Dataset, Sample, check_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.detector import Detector
from anomaly.errors import ConfigError, DataError
from anomaly.imaging.array_input import ImageLike, is_one, source_of
from anomaly.imaging.read import Decoding, described
from anomaly.runtime.devices import device_of
from anomaly.scoring.build import decoding_of
from anomaly.training.fit import StageProgress, train

log = logging.getLogger(__name__)

TrainingImages: TypeAlias = "str | os.PathLike[str] | Dataset | Iterable[ImageLike | Sample]"
"""A folder, a data set, or a collection of paths, arrays, PIL images, tensors or samples."""


def fit(
    images: TrainingImages,
    config: Config | Mapping[str, Any] | None = None,
    *,
    device: str | torch.device = "auto",
    calibrate: bool = True,
    progress: StageProgress = lambda stage, done, total: None,
) -> Detector:
    """Learn what good looks like.

    The thresholds come from scores of the same images by models that haven't learned from them;
    the detector itself learns from all.

    Args:
        images: good images only. A folder (all images in it and its subfolders), a list of paths,
            arrays, PIL images or tensors as for `Detector.predict`, or a data set that
            `anomaly.open_dataset` has listed, whose training split is taken; none of its images
            may be among the defects as well.
        config: settings, as in a config file: a `Config`, a dict of them
            (`{"model": {"kind": "padim"}}`), or None for the defaults. `data` isn't read.
        device: `auto` (the GPU where there is one), `cpu`, `cuda`, or a torch device.
        calibrate: whether to find thresholds. Without them predictions have no verdict.
        progress: called with (stage, done, total).

    Returns:
        The detector. A file that can't be used is left out, with a warning in the log.

    Raises:
        ConfigError: an unknown key, a wrong type or range.
        ImageError: an array can't be used as an image; says which and why.
        AnomalyError: no image can be used, one is labelled good and defective, or weights or layers
            can't be used as configured.
    """
    settings = _settings(config)
    samples = _samples(images, decoding_of(settings.image))
    test = images.test if isinstance(images, Dataset) else ()
    with tempfile.TemporaryDirectory(prefix="anomaly-") as scratch:
        training = train(
            settings,
            samples,
            defects=[sample for sample in test if sample.is_defect],
            device=device_of(device),
            scratch=Path(scratch),
            calibrate=calibrate,
            progress=progress,
        )
    for reason in training.refused.values():
        log.warning("skipped: %s", reason)
    return Detector(training.detector)


def _settings(config: Config | Mapping[str, Any] | None) -> Config:
    if isinstance(config, Config):
        return config
    if config is None or isinstance(config, Mapping):
        return parse_config(config or {}, "config")
    raise ConfigError(
        f"config is a {type(config).__name__}; give a Config, a dict of settings, or "
        "anomaly.load_config('file.yaml')"
    )


def _samples(images: TrainingImages, decoding: Decoding) -> list[Sample]:
    if isinstance(images, Dataset):
        return list(images.train)
    if isinstance(images, str | os.PathLike):
        return _files([Path(images)])
    if is_one(images):
        raise DataError("one image shows no variation; give a list of good images, or their folder")
    samples: list[Sample] = []
    files: list[Path] = []
    for index, image in enumerate(images):
        if isinstance(image, Sample):
            samples.append(image)
        elif isinstance(image, str | os.PathLike):
            files.append(Path(image))
        else:
            name, source = described(index), source_of(image, decoding, index)
            assert not isinstance(source, Path)
            samples.append(Sample(Path(name), name, image=source))
    if not files and not samples:
        raise DataError("no images to learn from; give good images, or the folder they are in")
    return samples + (_files(files) if files else [])


def _files(inputs: list[Path]) -> list[Sample]:
    """The images of files and folders, named by their place below the folder that holds all."""
    paths = find_inputs(inputs, option="images").paths
    check_inputs(inputs, paths)
    within = [path if path.is_dir() else path.parent for path in inputs]
    common = os.path.commonpath([path.absolute() for path in within])
    return [Sample(path, path.absolute().relative_to(common).as_posix()) for path in paths]
