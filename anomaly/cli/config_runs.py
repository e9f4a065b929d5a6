"""The runs of a config: one, or one for each product that it lists."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli.logging_setup import ProgressLine
from anomaly.cli.train_report import TrainOptions, train_and_say
from anomaly.config.load import load_config
from anomaly.config.schema import by_product
from anomaly.datasets import open_dataset
from anomaly.errors import AnomalyError, OutputError
from anomaly.evaluation.splits import images_to_test
from anomaly.files.lock import locked
from anomaly.report.category import evaluated
from anomaly.storage.folder import find_products
from anomaly.storage.load import load_model
from anomaly.storage.manifest import MANIFEST, read_manifest
from anomaly.training.runs import check_same

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anomaly.config.schema import Config
    from anomaly.datasets import Dataset
    from anomaly.report.category import Category


log = logging.getLogger(__name__)


def train_products(
    config: Config, datasets: Sequence[Dataset], output: Path, how: TrainOptions
) -> int:
    """Train a model for each category that a config lists, each a run in a folder.

    One that is there already and was trained with the same settings is kept, unless it is to be
    overwritten. Where one fails, the others go on.

    Args:
        config: lists categories.
        datasets: of these, in their order.
        output: the folder of their runs.
        how: to train.

    Returns:
        The exit code: 3 where images or a product couldn't be used, 2 where no product could.
    """
    if (output / "model").exists():  # it would hide those beside it
        raise OutputError(
            f"{output} holds the run of one model; give another --output for those of several "
            "products"
        )
    codes: list[int] = []
    names = list(by_product(config))
    for number, (name, dataset) in enumerate(zip(names, datasets, strict=True), 1):
        log.info("%s, product %d of %d", name, number, len(datasets))
        try:
            others = names[: number - 1] if how.overwrite else names
            mine = product_config(config, name, output, others)
            remedy = "--overwrite trains all products again"
            code = _train_unless_there(mine, dataset, output / name, how, name, remedy)
        except AnomalyError as error:
            log.error("%s: %s", name, error)
            code = 2
        if code is None:
            log.info("%s was trained with these settings before, and is kept", name)
        codes.append(code or 0)
    if min(codes) == 2:
        return 2
    if len(names) > 1:
        print(f"all in {output}: anomaly infer --model {shlex.quote(str(output))} tells them apart")
    return 3 if any(codes) else 0


def trained_run(
    config_file: str, overrides: Sequence[str], runs: Path, how: TrainOptions, product: str = ""
) -> Path:
    """The run of a config, trained now unless it has been before.

    Args:
        config_file: the config, or its bare name.
        overrides: of its settings.
        runs: the folder of runs.
        how: to train.
        product: one of the categories that it lists; empty where it lists none.

    Raises:
        ConfigError: a run of this name was trained with other settings.
        AnomalyError: training failed.
    """
    config = load_config(config_file, overrides)
    run = runs / config.name
    if product:
        config = product_config(config, product, run, list(by_product(config)))
        run = run / product
    dataset = open_dataset(config.data.format, config.data.root, config.data.category)
    _train_unless_there(config, dataset, run, how, product)
    return run


def _train_unless_there(
    config: Config,
    dataset: Dataset,
    run: Path,
    how: TrainOptions,
    product: str = "",
    remedy: str = "",
) -> int | None:
    """Train into a run's folder, unless a run of the same settings is there and is to stay.

    Args:
        config: all settings.
        dataset: that they name.
        run: the folder.
        how: to train.
        product: names it, for progress; empty for one that isn't one of several.
        remedy: what to do where the run was trained with other settings, see `check_same`.

    Returns:
        The exit code of training; None where the run stays.

    Raises:
        ConfigError: a run that is there was trained with other settings.
        AnomalyError: training failed.
    """
    with locked(run):  # it may be being trained
        if (run / "model").exists() and not how.overwrite:
            check_same(run, config, dataset, remedy)
            return None
        return train_and_say(config, dataset, run, how, product)


def product_config(config: Config, product: str, folder: Path, others: Sequence[str]) -> Config:
    """The config of one of several products, in the precision that the others' models have.

    Models share a pass of the network only if they have one precision, so that the first that is
    trained settles it where it is left open.

    Args:
        config: lists categories.
        product: one of them.
        folder: of their runs.
        others: those that it is to go with, as far as they are trained.
    """
    mine = by_product(config)[product]
    trained = [one for one in others if (folder / one / "model" / MANIFEST).is_file()]
    if config.precision != "auto" or not trained:
        return mine
    made = read_manifest(folder / trained[0] / "model")["made_with"]
    return mine.model_copy(update={"precision": made["precision"]})


@dataclass(frozen=True)
class Source:
    """What a model to evaluate comes from.

    Attributes:
        named: a run or model folder, a folder of runs, or a config, as the user named it.
        product: one of those runs, or of the categories that the config lists; else empty.
    """

    named: str
    product: str = ""

    def __str__(self) -> str:
        return f"{self.named}: {self.product}" if self.product else self.named


def sources(options: argparse.Namespace) -> list[Source]:
    """The models that the options name: of a folder of runs or a list of categories, each."""
    found: list[Source] = []
    for folder in options.model or ():
        with suppress(AnomalyError):  # said when it is evaluated
            if products := find_products(folder):
                found += [Source(str(folder), product) for product in products]
                continue
        found.append(Source(str(folder)))
    for config in options.config or ():
        listed: Iterable[str] = ()
        with suppress(AnomalyError):
            listed = by_product(load_config(config, options.overrides))
        found += [Source(config, product) for product in listed] or [Source(config)]
    return found


def made(source: Source, options: argparse.Namespace, device: Any, threads: int) -> Category:
    """Evaluate one model, which is trained first where the options name configs.

    Raises:
        AnomalyError: it can't be trained or evaluated.
    """
    folder = Path(source.named) / source.product
    if options.config:
        how = TrainOptions(device, threads)
        folder = trained_run(source.named, options.overrides, options.runs, how, source.product)
    return _evaluate(folder, options, device, threads)


def _evaluate(folder: Path, options: argparse.Namespace, device: Any, threads: int) -> Category:
    """Evaluate one model."""
    detector = load_model(folder, device)
    samples, data_folder = images_to_test(
        detector,
        folder,
        data_root=options.data_root,
        good=options.good,
        defects=options.defects,
        masks=options.masks,
    )
    with ProgressLine() as progress:
        return evaluated(
            detector,
            samples,
            data_folder,
            mask_above=detector.config.data.mask_above,
            own_split=not (options.good or options.defects),
            workers=threads,
            progress=lambda done, total: progress(detector.config.name, done, total),
            model=str(folder),
        )
