"""What `anomaly evaluate` is asked for, model by model, and one of them evaluated."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli.config_runs import trained_run
from anomaly.cli.progress import ProgressLine
from anomaly.cli.trained import TrainOptions
from anomaly.config.categories import by_product
from anomaly.config.files import load_config
from anomaly.errors import AnomalyError
from anomaly.evaluation.test_split import images_to_test
from anomaly.model.checkpoint import load
from anomaly.model.folder import find_products
from anomaly.report.category import evaluated

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anomaly.report.category import Category


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
    return _evaluate(folder, options, device, threads, told=bool(source.product))


def _evaluate(
    folder: Path, options: argparse.Namespace, device: Any, threads: int, told: bool
) -> Category:
    """Evaluate one model; `told`, if its images are to be told from those of other products."""
    detector = load(folder, device)
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
            keep_looks=told,
        )
