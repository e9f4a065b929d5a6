"""Options that several commands have, and what is settled once: the device and the threads."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, ModelError
from anomaly.runtime.devices import CPU, device_of
from anomaly.runtime.parallel import cores, cpu_quota, use_threads
from anomaly.storage.exported import is_exported
from anomaly.storage.folder import find_products

if TYPE_CHECKING:
    import torch

    from anomaly.cluster.actors import Cluster

log = logging.getLogger(__name__)


def annex(name: str) -> Any:
    """A module of an annex: of `station`, `line`, `cluster`, `export` or `sample_data`.

    The core runs without them, so that it imports none at its top.

    Args:
        name: below `anomaly`.

    Raises:
        AnomalyError: this installation came without it.
    """
    try:
        return import_module(f"anomaly.{name}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("anomaly."):
            raise
        room = name.partition(".")[0]
        raise AnomalyError(
            f"this command needs anomaly.{room}, which isn't installed; install all of anomaly"
        ) from None


@dataclass(frozen=True)
class Command:
    """A command of an annex; those of the core are modules with these two functions.

    Attributes:
        add_arguments: declares the options.
        run: does the work; returns the exit code.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_paths(
    parser: argparse._ActionsContainer,
    option: str,
    text: str,
    metavar: str = "PATH",
    kind: Callable[[str], Any] = Path,
) -> None:
    """An option that takes paths, or others of a kind, and may be repeated; empty by default."""
    parser.add_argument(
        option, type=kind, action="extend", nargs="+", default=[], metavar=metavar, help=text
    )


def add_output(
    parser: argparse.ArgumentParser, text: str, replaces: str = "an earlier run"
) -> None:
    """The options on the folder to write into, and on what is there already."""
    parser.add_argument("--output", type=Path, required=True, help=text)
    parser.add_argument("--overwrite", action="store_true", help=f"replace {replaces} there")


def add_device(parser: argparse.ArgumentParser) -> None:
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
        help="processor threads (default: as many as this process, or its container, may use)",
    )


def number(text: str) -> float:
    """A number of an option, for `argparse`; the error says how to write one with `,` or `%`."""
    with suppress(ValueError):
        return float(text)
    remedy = ""
    with suppress(ValueError):
        plain = float(text.replace(",", ".").rstrip("% "))
        remedy = f"; write {plain / (100 if text.rstrip().endswith('%') else 1):g}"
    raise argparse.ArgumentTypeError(f"{text!r} is no number{remedy}")


_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    """Seconds of an option such as `10m`, for `argparse`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|[smh])", text.strip())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a time; write it like 90s, 10m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def add_config(parser: argparse.ArgumentParser) -> None:
    """The options that name a config and change its values."""
    parser.add_argument(
        "--config", required=True, help="a YAML file, or a bare name looked up in configs/"
    )
    add_settings(parser, "override a setting, e.g. --set model.kind=padim; may be repeated")


def add_settings(parser: argparse.ArgumentParser, text: str) -> None:
    """The option that changes a config's values."""
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text
    )


def add_cluster(parser: argparse._ActionsContainer, text: str) -> None:
    """The options of commands that a Ray cluster can share; `text` says what it does."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"{text} (auto, HOST:PORT, ray://…), or of one that is started here (local); "
        "--threads is then for each worker (default: 1)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="with --ray: largest number of workers (default: as many as fit the cluster)",
    )


@contextmanager
def joined_cluster(options: argparse.Namespace) -> Iterator[Cluster | None]:
    """Connect to the Ray cluster of --ray for the block; yields None without --ray.

    Raises:
        AnomalyError: an impossible number of workers or threads, or no cluster answers.
    """
    check_cluster(options)
    if options.ray is None:
        yield None
        return
    threads = wanted_threads(options) if options.threads else 1
    with annex("cluster.actors").joined(
        options.ray, threads, options.workers, options.device
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


def check_images(options: argparse.Namespace, *names: str) -> None:
    """See that options which name image files or folders name some, before torch is imported.

    Args:
        options: of the command.
        names: of these options, without the dashes; those that aren't given are passed over.

    Raises:
        DataError: a file or a folder doesn't exist, or there is no image.
    """
    for name in names:
        if paths := getattr(options, name):
            find_inputs(paths, option=f"--{name}")


def passed_on(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Arguments for further commands: what changes settings, and where and how to compute."""
    settings = [part for override in options.overrides for part in ("--set", override)]
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    return settings, ["--device", options.device, *threads]


def wanted_threads(options: argparse.Namespace) -> int:
    """How many threads `device_and_threads` will use.

    Raises:
        AnomalyError: an impossible number.
    """
    threads: int = cores() if options.threads is None else options.threads
    if threads < 1:
        raise AnomalyError(f"--threads is {threads}; it must be 1 or more")
    return threads


def device_and_threads(
    options: argparse.Namespace, models: Sequence[Path] | None = None
) -> tuple[torch.device, int]:
    """Set the threads of every library and choose the device.

    Torch is imported for it unless exported models are all that is asked for.

    Args:
        options: of the command.
        models: the folders it works with; by default those given with --model.

    Returns:
        The device, and the number of threads.

    Raises:
        AnomalyError: a GPU was asked for and isn't there, or isn't for the model; or an impossible
            number of threads.
    """
    threads = wanted_threads(options)
    import cv2

    use_threads(threads)  # torch and faiss follow when they are imported
    if threads > (quota := cpu_quota()) + 1:  # a part of a processor is rounded up
        log.warning(
            "--threads %d: this container's quota is %g processors, so some threads will wait; "
            "leave --threads off to use as many as the quota allows",
            threads,
            quota,
        )
    cv2.setNumThreads(1)  # files are decoded in parallel already
    if models is None:
        model = getattr(options, "model", None) or []
        models = model if isinstance(model, list) else [model]
    exported = [_is_exported(folder) for folder in models]
    if not any(exported):
        device = device_of(options.device)
        log.debug("on %s (--device %s), %d threads", device, options.device, threads)
        return device, threads
    if options.device == "cuda":
        raise AnomalyError("an exported model computes on the CPU; leave --device out")
    return CPU if all(exported) else device_of("cpu"), threads


def _is_exported(folder: Path) -> bool:
    with suppress(ModelError):  # said where it is loaded
        places = find_products(folder).values() or (folder, folder / "model")
        return any(map(is_exported, places))
    return False
