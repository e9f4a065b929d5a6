"""`anomaly train`: good images -> a model folder and train.json, for each product of a config."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.backbones.weights import check_weights
from anomaly.cli import annex
from anomaly.cli.common_options import device_and_threads, joined_cluster
from anomaly.cli.logging_setup import ProgressLine
from anomaly.config.load import load_config
from anomaly.config.schema import Config, by_product
from anomaly.datasets import Dataset, open_dataset
from anomaly.errors import AnomalyError, OutputError, WriteError, first_of, some
from anomaly.evaluation.weaknesses import Run, lines, of_training
from anomaly.files.outputs import locked
from anomaly.storage.folder import MANIFEST, read_manifest
from anomaly.training.runs import check_same, train_run

if TYPE_CHECKING:
    import torch

    from anomaly.scoring.pipeline import Model
    from anomaly.training.fit import SharedFeaturesOf

log = logging.getLogger(__name__)

_NAMED = 3  # images that stand out; train.json has all


def run(options: argparse.Namespace) -> int:
    """Train one model, or one for each of several products."""
    config = load_config(options.config, options.overrides)
    output: Path = options.output or Path("runs") / config.name
    data = config.data
    several = isinstance(data.category, tuple)
    with locked(output):
        # Before torch is imported, which takes seconds.
        configs = list(by_product(config).values()) or [config]
        datasets = [open_dataset(data.format, data.root, one.data.category) for one in configs]
        if not several:  # of several all may be trained
            check_weights(config.backbone.weights)
        device, threads = device_and_threads(options)
        with joined_cluster(options, device) as cluster:
            shared = (
                None
                if cluster is None
                else partial(annex("cluster.features").ClusterFeatures, cluster)
            )
            train = TrainOptions(
                device, threads, not options.no_calibrate, options.overwrite, shared
            )
            if several:
                return train_products(config, datasets, output, train)
            return train_and_report(config, datasets[0], output, train, reported=options.reported)


@dataclass(frozen=True)
class TrainOptions:
    """How a command trains, whatever the config: arguments of `train_run`, by name.

    Attributes:
        device: where to compute.
        workers: decoding processes.
        calibrate: whether to find thresholds.
        overwrite: replace an earlier run.
        shared: has other machines compute features and scores; None for this process.
    """

    device: torch.device
    workers: int
    calibrate: bool = True
    overwrite: bool = False
    shared: SharedFeaturesOf | None = None


def train_products(
    config: Config, datasets: Sequence[Dataset], output: Path, options: TrainOptions
) -> int:
    """Train a model for each category that a config lists, each a run in a folder.

    One that is there already and was trained with the same settings is kept, unless it is to be
    overwritten. Where one fails, the others go on.

    Args:
        config: lists categories.
        datasets: of these, in their order.
        output: the folder of their runs.
        options: how to train.

    Returns:
        The exit code: 3 where images or a product couldn't be used, 2 where no product could.
    """
    if (output / "model").exists():  # it would hide those beside it
        raise OutputError(
            f"{output} holds the run of one model; give another --output for those of several "
            "products"
        )
    codes: list[int] = []
    products = list(by_product(config))
    for number, (product, dataset) in enumerate(zip(products, datasets, strict=True), 1):
        log.info("%s, product %d of %d", product, number, len(datasets))
        try:
            others = products[: number - 1] if options.overwrite else products
            own_config = _product_config(config, product, output, others)
            remedy = "--overwrite trains all products again"
            codes.append(
                _train_unless_there(own_config, dataset, output / product, options, product, remedy)
            )
        except WriteError:  # there is no room for the others either
            raise
        except AnomalyError as error:
            log.error("%s: %s", product, error)
            codes.append(2)
    if min(codes) == 2:
        return 2
    if len(products) > 1:
        print(
            f"all models are in {output}; anomaly infer --model {shlex.quote(str(output))} "
            "recognises the product in each image"
        )
    return 3 if any(codes) else 0


def trained_run(
    config_file: str, overrides: Sequence[str], runs: Path, options: TrainOptions, product: str = ""
) -> Path:
    """The run of a config, trained now unless it has been before.

    Args:
        config_file: the config, or its bare name.
        overrides: of its settings.
        runs: the folder of runs.
        options: how to train.
        product: one of the categories that it lists; empty where it lists none.

    Raises:
        ConfigError: a run of this name was trained with other settings.
        AnomalyError: training failed.
    """
    config = load_config(config_file, overrides)
    run = runs / config.name
    if product:
        config = _product_config(config, product, run, list(by_product(config)))
        run = run / product
    dataset = open_dataset(config.data.format, config.data.root, config.data.category)
    _train_unless_there(config, dataset, run, options, product)
    return run


def _train_unless_there(
    config: Config,
    dataset: Dataset,
    run: Path,
    options: TrainOptions,
    product: str = "",
    remedy: str = "",
) -> int:
    """Train into a run's folder, unless a run of the same settings is there and is to stay.

    Args:
        config: all settings.
        dataset: that they name.
        run: the folder.
        options: how to train.
        product: for progress; empty for one that isn't one of several.
        remedy: what to do where the run was trained with other settings, see `check_same`.

    Returns:
        The exit code of training; 0 where the run stays.

    Raises:
        ConfigError: a run that is there was trained with other settings.
        AnomalyError: training failed.
    """
    with locked(run):  # it may be being trained
        if not (run / "model").exists() or options.overwrite:
            return train_and_report(config, dataset, run, options, product)
        check_same(run, config, dataset, remedy)
    log.info("%s is already trained with these settings and is kept", config.name)
    return 0


def _product_config(config: Config, product: str, folder: Path, others: Sequence[str]) -> Config:
    """The config of one of several products, in the precision that the others' models have.

    Models share a pass of the network only if they have one precision, so that the first that is
    trained settles it where it is left open.

    Args:
        config: lists categories.
        product: one of them.
        folder: of their runs.
        others: those that it is to go with, as far as they are trained.
    """
    own = by_product(config)[product]
    models = [folder / other / "model" for other in others]
    trained = [model for model in models if (model / MANIFEST).is_file()]
    if config.precision != "auto" or not trained:
        return own
    return own.model_copy(update={"precision": read_manifest(trained[0])["made_with"]["precision"]})


def train_and_report(
    config: Config,
    dataset: Dataset,
    output: Path,
    options: TrainOptions,
    product: str = "",
    reported: Container[str] = (),
) -> int:
    """Train one model, and print what came of it.

    Args:
        config: all settings.
        dataset: what to learn from.
        output: the run's folder.
        options: how to train.
        product: for progress; empty for one that isn't one of several.
        reported: reasons why images can't be used that are printed already.

    Returns:
        The exit code: 3 where images couldn't be used.
    """
    with ProgressLine() as line:

        def progress(stage: str, done: int, total: int) -> None:
            line(f"{product}, {stage}" if product else stage, done, total)

        training, summary = train_run(config, dataset, output, **vars(options), progress=progress)
    _report(summary, output, training.detector, reported)
    return 3 if training.refused else 0


def _report(summary: dict[str, Any], output: Path, model: Model, reported: Container[str]) -> None:
    thresholds = model.thresholds
    images, vectors = summary["images"]["learned"], summary["bank_vectors"]
    kept = f", {vectors:,} kept in the memory bank" if vectors else ""
    print(
        f"trained {summary['name']} ({summary['kind']}) on {images} images, "
        f"{summary['patches']:,} patches{kept}"
    )
    if thresholds is None:
        print(
            "no thresholds, so results will have no verdicts; find thresholds with `anomaly "
            "calibrate`"
        )
    else:
        print("\n".join(thresholds.lines()))
    _report_patch_size(summary)
    if summary["left_out"]:
        names = summary["stand_out"]
        log.info(
            "left out of training, because they look unlike all other images: %s%s. If they are "
            "good, train with --set model.leave_out_suspects=false",
            some([*names], most=_NAMED),
            ", train.json names all" if len(names) > _NAMED else "",
        )
    for line in lines(of_training(Run(model, output, summary))):
        log.info(line)
    refused = [reason for reason in summary["refused"].values() if reason not in reported]
    for reason in first_of(refused, "; train.json lists all"):
        log.warning("skipped: %s", reason)
    seconds, peak = summary["seconds"]["total"], summary["peak_memory_bytes"] / 1e9
    print(
        f"took {seconds:.1f} s, peak memory {peak:.2f} GB; "
        f"model {summary['model_id']} in {output / 'model'}"
    )


def _report_patch_size(summary: dict[str, Any]) -> None:
    (height, width), mm = summary["patch_size"]["pixels"] or (0.0, 0.0), summary["patch_size"]["mm"]
    real = f", {mm[0]:.3g} × {mm[1]:.3g} mm" if mm else ""
    log.info(
        f"one patch covers {height:.0f} × {width:.0f} original pixels{real} (height × width): "
        "smaller defects may not be seen"
    )
