"""Questions, cluster, device and threads of a command, from options that several have."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import cv2

from anomaly.cli import annex
from anomaly.errors import AnomalyError, ModelError
from anomaly.imaging.pool import warm_up
from anomaly.runtime import CPU, cores, device_of, use_threads
from anomaly.storage.folder import EXPORT, find_model, find_runs

if TYPE_CHECKING:
    import torch

    from anomaly.cluster.workers import Cluster

log = logging.getLogger(__name__)


def is_interactive() -> bool:
    """True if a person reads the output and can answer at the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask(question: str) -> str:
    """A person's answer at the terminal; empty without a terminal."""
    return input(f"{question} ").strip() if is_interactive() else ""


def agrees(question: str) -> bool:
    """True if a person at the terminal says yes; no is the default."""
    return ask(f"{question} [y/N]").lower() in ("y", "yes")


def agreed(doubts: Sequence[str], options: argparse.Namespace) -> bool:
    """Warn of doubts; True if there are none, or `--yes` or a person at the terminal agrees."""
    for doubt in doubts:
        log.warning(doubt)
    if options.yes or not doubts or agrees("Go on anyway?"):
        return True
    log.error("refused: nothing was changed; look at these images, or add --yes")
    return False


def joined_cluster(
    options: argparse.Namespace, device: torch.device
) -> AbstractContextManager[Cluster | None]:
    """The Ray cluster of --ray, joined for a `with` block; None without --ray.

    Args:
        options: the command's options.
        device: CPU or GPU; each worker computes on one of its own.

    Raises:
        AnomalyError: no cluster answers.
    """
    if options.ray is None:
        return nullcontext()
    joined = annex("cluster.workers").joined(options.ray, device.type)
    return cast("AbstractContextManager[Cluster]", joined)


def chosen_device(
    options: argparse.Namespace, models: Sequence[Path] | None = None, images: int = 0
) -> torch.device:
    """Set the threads of every library, start decoding processes, and choose the device.

    Torch is imported here, unless all models are exported ones.

    Args:
        options: the command's options.
        models: model folders; by default those of --model.
        images: number of images to read; decoding processes start while torch is imported.

    Raises:
        AnomalyError: a GPU was asked for and isn't there, or isn't for the model.
    """
    threads, wanted = cores(), getattr(options, "device", "auto")
    use_threads(threads)  # torch and faiss follow when they are imported
    cv2.setNumThreads(1)  # files are decoded in parallel already
    warm_up(images)
    if models is None:
        model = getattr(options, "model", None) or []
        models = model if isinstance(model, list) else [model]
    exported = [_is_exported(folder) for folder in models]
    if not any(exported):
        device = device_of(wanted)
        log.debug("on %s (--device %s), %d threads", device, wanted, threads)
        return device
    if wanted == "cuda":
        raise AnomalyError("an exported model computes on the CPU; leave --device out")
    return CPU if all(exported) else device_of("cpu")


def _is_exported(folder: Path) -> bool:
    with suppress(ModelError):  # loading it says why
        return any((find_model(run) / EXPORT).exists() for run in find_runs(folder))
    return False
