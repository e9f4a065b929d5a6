"""What commands do with options that several have: images, cluster, device and threads."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import cv2

from anomaly.cli import annex
from anomaly.datasets import Sample, check_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, ModelError
from anomaly.imaging.pool import warm_up
from anomaly.runtime.devices import CPU, device_of
from anomaly.runtime.parallel import cores, cpu_quota, use_threads
from anomaly.storage.exported import is_exported
from anomaly.storage.folder import find_runs

if TYPE_CHECKING:
    import torch

    from anomaly.cluster.actors import Cluster

log = logging.getLogger(__name__)


def ask(question: str) -> str:
    """A person's answer at the terminal; empty without a terminal."""
    return input(f"{question} ").strip() if sys.stdin.isatty() and sys.stdout.isatty() else ""


def agreed(doubts: Iterable[str], options: argparse.Namespace) -> bool:
    """Warn of doubts; True if there are none, or `--yes` or a person at the terminal agrees."""
    doubts = [doubt for doubt in doubts if doubt]
    for doubt in doubts:
        log.warning(doubt)
    if options.yes or not doubts or ask("Go on anyway? [y/N]").lower() in ("y", "yes"):
        return True
    log.error("refused: nothing was changed; look at these images, or add --yes")
    return False


@contextmanager
def joined_cluster(options: argparse.Namespace, device: torch.device) -> Iterator[Cluster | None]:
    """Connect to the Ray cluster of --ray for the block; yields None without --ray.

    Args:
        options: of the command.
        device: where workers compute, each on one of its own.

    Raises:
        AnomalyError: an impossible number of workers or threads, or no cluster answers.
    """
    check_cluster(options)
    if options.ray is None:
        yield None
        return
    threads = wanted_threads(options) if options.threads else 1
    with annex("cluster.actors").joined(
        options.ray, threads, options.workers, device.type
    ) as cluster:
        yield cluster


def check_cluster(options: argparse.Namespace) -> None:
    """See that --workers goes with --ray.

    Raises:
        AnomalyError: it doesn't.
    """
    if options.workers is not None and options.ray is None:
        raise AnomalyError("--workers needs a Ray cluster; give --ray")
    if options.workers is not None and options.workers < 1:
        raise AnomalyError(f"--workers is {options.workers}; it must be 1 or more")


def images_given(options: argparse.Namespace, name: str, *, unsorted: bool = False) -> list[Sample]:
    """The images of an option, found before torch is imported; none where it isn't given.

    Args:
        options: of the command.
        name: of the option, without the dashes.
        unsorted: whether nobody has sorted them, whatever their names say.

    Raises:
        DataError: a file or a folder doesn't exist, there is no image, or names of folders or files
            contradict what they are given as.
    """
    paths: Sequence[Path] = getattr(options, name) or ()
    found = find_inputs(paths, option=f"--{name}").paths if paths else []
    if not unsorted:
        check_inputs(paths, found, defects=name == "defects")
    return [Sample(path, str(path)) for path in found]


def passed_on(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Arguments for further commands: what changes settings, and where and how to compute."""
    settings = [part for override in options.overrides for part in ("--set", override)]
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    return settings, ["--device", options.device, *threads]


def wanted_threads(options: argparse.Namespace) -> int:
    """How many threads the command computes with.

    Raises:
        AnomalyError: an impossible number.
    """
    threads: int = cores() if options.threads is None else options.threads
    if threads < 1:
        raise AnomalyError(f"--threads is {threads}; it must be 1 or more")
    return threads


def chosen_device(
    options: argparse.Namespace, models: Sequence[Path] | None = None, images: int = 0
) -> torch.device:
    """Set the threads of every library, start decoding processes, and choose the device.

    Torch is imported for it unless exported models are all that is asked for.

    Args:
        options: of the command.
        models: the folders it works with; by default those given with --model.
        images: how many it will read: their processes start while torch is imported.

    Raises:
        AnomalyError: a GPU was asked for and isn't there, or isn't for the model; or an impossible
            number of threads.
    """
    threads = wanted_threads(options)
    use_threads(threads)  # torch and faiss follow when they are imported
    if threads > (quota := cpu_quota()) + 1:  # a part of a processor is rounded up
        log.warning(
            "--threads %d: this container's quota is %g processors, so some threads will wait; "
            "leave --threads off to use as many as the quota allows",
            threads,
            quota,
        )
    cv2.setNumThreads(1)  # files are decoded in parallel already
    warm_up(images)
    if models is None:
        model = getattr(options, "model", None) or []
        models = model if isinstance(model, list) else [model]
    exported = [_is_exported(folder) for folder in models]
    if not any(exported):
        device = device_of(options.device)
        log.debug("on %s (--device %s), %d threads", device, options.device, threads)
        return device
    if options.device == "cuda":
        raise AnomalyError("an exported model computes on the CPU; leave --device out")
    return CPU if all(exported) else device_of("cpu")


def _is_exported(folder: Path) -> bool:
    with suppress(ModelError):  # said where it is loaded
        return any(is_exported(run) or is_exported(run / "model") for run in find_runs(folder))
    return False
