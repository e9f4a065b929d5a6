"""Options that several commands have, and what is settled once: the device and the threads."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from anomaly.errors import AnomalyError

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every command with a network takes."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto takes the GPU where there is one",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=None,
        metavar="N",
        help="processor threads (default: as many as this process may use)",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """The options that name a config and change its values."""
    parser.add_argument(
        "--config", required=True, help="a YAML file, or a bare name looked up in configs/"
    )
    add_settings(parser, "override a setting, e.g. --set model.kind=padim; may be repeated")


def add_settings(parser: argparse.ArgumentParser, told: str) -> None:
    """The option that changes a config's values; `told` is its help."""
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=told
    )


def add_precision(parser: argparse.ArgumentParser) -> None:
    """The option of commands that use a trained model."""
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help="compute in this number format instead of the model's own",
    )


def passed_on(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Arguments for further commands: what changes settings, and where and how to compute."""
    settings = [part for override in options.overrides for part in ("--set", override)]
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    return settings, ["--device", options.device, *threads]


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def wanted_threads(options: argparse.Namespace) -> int:
    """How many threads `device_and_threads` will use.

    Raises:
        AnomalyError: an impossible number.
    """
    threads: int = cores() if options.threads is None else options.threads
    if threads < 1:
        raise AnomalyError(f"--threads is {threads}; it must be 1 or more")
    return threads


def device_and_threads(options: argparse.Namespace) -> tuple[torch.device, int]:
    """Set the threads of every library and choose the device.

    Returns:
        The torch device, and the number of threads.

    Raises:
        AnomalyError: a GPU was asked for and isn't there, or an impossible number of threads.
    """
    threads = wanted_threads(options)
    import cv2
    import torch

    from anomaly.runtime import device_of

    torch.set_num_threads(threads)  # faiss follows when its index is made
    cv2.setNumThreads(1)  # files are decoded in parallel already
    device = "cpu" if options.device == "auto" and _exported(options) else options.device
    return device_of(device), threads


def _exported(options: argparse.Namespace) -> bool:
    """Whether a model that was exported is among those named: its engine computes on the CPU."""
    from anomaly.model.folder import EXPORT

    named = getattr(options, "model", None) or []
    folders = named if isinstance(named, list) else [named]
    return any(
        (place / EXPORT).exists() for folder in folders for place in (folder, folder / "model")
    )
