"""The command line: `anomaly <command>`, or `python -m anomaly <command>`."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from anomaly.cli.commands import COMMANDS, overview
from anomaly.cli.terminal import (
    Interrupted,
    Stopping,
    add_logging,
    command_line,
    log_to_terminal,
    plain_output,
)
from anomaly.errors import DISK, AnomalyError, WriteError, nearest, needs_training
from anomaly.runtime import __version__, cores, use_threads

log = logging.getLogger(__name__)

_GARBAGE = 10_000  # new objects after which Python searches for garbage again


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 all done, 1 refused or a change found (see the commands), 2 nothing done,
        3 some images couldn't be used, 4 results couldn't be written to a disk, 130 interrupted
        (by SIGTERM: 143), 141 nobody reads the output any more.
    """
    with plain_output():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(arguments: list[str]) -> int:
    """Run one command, with its output made plain already; returns the exit code."""
    _set_environment()
    use_threads(cores())  # torch and faiss follow when they are imported
    # Importing torch makes so many objects that searching them for garbage takes 1/6 of the time.
    gc.set_threshold(_GARBAGE)
    try:
        options = _parse(arguments or ["--help"])
    except AnomalyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    started = time.monotonic()
    with log_to_terminal(quiet=options.quiet, verbose=options.verbose):
        try:
            with Stopping(politely=False):
                code = _run_of(options.command)(options)
        except Exception as error:
            code = _report_error(error, options.command)
        except KeyboardInterrupt as stop:
            print(str(stop) or "interrupted", file=sys.stderr)
            code = stop.exit_code if isinstance(stop, Interrupted) else 130
        log.debug("exit code %d after %.1f s", code, time.monotonic() - started)
    return code


def _set_environment() -> None:
    """Set what libraries read once, when they are loaded, unless the user has set it."""
    # Numpy's products run side by side on the program's own threads (`anomaly.runtime`);
    # those of its library beside them would only wait for one another.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # files are decoded in parallel already
    # Torch's large tensors lie in pages of 2 MiB: fresh memory comes 512 times less often.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # GNU's OpenMP waits for the next operation by spinning, 300,000 turns by default: milliseconds
    # in which the search's own threads and the decoding processes lack a core.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _report_error(error: Exception, command: str) -> int:
    """Log an error that a user's input, files or machine have caused; returns the exit code.

    Raises:
        Exception: the error itself, where it is a defect of this program.
    """
    match error:
        case AnomalyError():
            # The remedy for Python; the command line has --overwrite.
            log.error("%s", str(error).replace(" (overwrite=True)", ""))
            return error.exit_code
        case ModuleNotFoundError():
            log.error("%s", needs_training(command, error))
        case BrokenPipeError():
            # The reader of our output went away; Python would complain again while shutting down.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        case OSError():  # unforeseen errors of disks, networks and permissions
            where = "" if error.filename is None else f"{error.filename}: "
            log.error("%s%s", where, error.strerror or error)
            return WriteError.exit_code if error.errno in DISK else 2
        case RuntimeError() if type(error).__name__ == "OutOfMemoryError":  # of torch
            log.error(
                "the GPU has too little free memory: end other programs on it, set a smaller "
                "batch size (--set batch_size=1), or give --device cpu"
            )
        case _:
            raise error
    return 2


def execute(arguments: Sequence[str], reported: Collection[str] = ()) -> int:
    """Run a command inside another one; its command line is printed first.

    Args:
        arguments: the command's name and its options, as typed.
        reported: reasons for unusable files that were printed already, so the command needn't.

    Returns:
        The command's exit code.

    Raises:
        AnomalyError: the command was refused or has failed.
    """
    log.info("\n$ anomaly %s", command_line(arguments))
    options = _parse(arguments)
    options.reported = reported
    return _run_of(options.command)(options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, and its `command`.

    Raises:
        AnomalyError: there is no such command or option.
        SystemExit: help or the version was printed, or an option's value was refused.
    """
    command, *rest = arguments
    if command.startswith("-"):
        _overview_parser().parse_args(arguments)
    if command not in COMMANDS:
        raise AnomalyError(f"there is no command {command!r}; {nearest(command, COMMANDS)}")
    _check_options(command, rest)
    return _parser(command).parse_args(rest, argparse.Namespace(command=command))


def _check_options(command: str, arguments: Sequence[str]) -> None:
    """Refuse unknown options first: argparse would complain of missing ones instead."""
    known = options_of(command)
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == "--":  # no options follow
            return
        # argparse takes the beginning of an option's name as well.
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            raise AnomalyError(
                f"anomaly {command} has no option {name}; {nearest(name, known)}\n"
                f"example: anomaly {COMMANDS[command].examples[0]}"
            )


def _overview_parser() -> argparse.ArgumentParser:
    """The parser of a command line without a command: help, and the version."""
    parser = argparse.ArgumentParser(
        prog="anomaly",
        usage="anomaly [-h] [--version] COMMAND …",
        description="Visual inspection that learns what good looks like.",
        epilog=overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anomaly {__version__}")
    return parser


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command's options; the command's own module isn't imported."""
    about = COMMANDS[command]
    parser = argparse.ArgumentParser(
        prog=f"anomaly {command}",
        description=about.help[0].upper() + about.help[1:] + ".",
        epilog="\n".join(["examples:", *(f"  anomaly {line}" for line in about.examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in about.options:
        add(parser)
    add_logging(parser)
    return parser


def options_of(command: str) -> list[str]:
    """The long options of a command, as typed: `--model`."""
    # argparse has no public list of a parser's options.
    actions = _parser(command)._actions
    return [name for action in actions for name in action.option_strings if name[1] == "-"]


def _run_of(command: str) -> Callable[[argparse.Namespace], int]:
    """The function that does the work of a command."""
    home = annex(COMMANDS[command].home or f"cli.{command}")
    return cast(Callable[[argparse.Namespace], int], getattr(home, f"run_{command}"))


def annex(name: str) -> Any:
    """Import a module that is slow to import or lies above this one; `name` lacks `anomaly.`."""
    return importlib.import_module(f"anomaly.{name}")
