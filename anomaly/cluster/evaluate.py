"""`anomaly evaluate --ray`: models trained and evaluated side by side on a cluster."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TypeAlias

from anomaly.cli.common_options import device_and_threads
from anomaly.cli.evaluate import Source, evaluate_source
from anomaly.cli.evaluate import sources as sources_of
from anomaly.cli.logging_setup import ProgressLine, is_quiet, log_to_terminal
from anomaly.cluster.actors import Actor, Cluster, Work, dispatch
from anomaly.errors import AnomalyError
from anomaly.report.category import Category

Outcome: TypeAlias = Category | AnomalyError
Said: TypeAlias = tuple[str, str]  # on stdout and stderr


def run(
    options: argparse.Namespace, cluster: Cluster, take: Callable[[Source, Outcome], None]
) -> None:
    """Evaluate every model that the options name.

    Args:
        options: of `anomaly evaluate`.
        cluster: where the workers are.
        take: called with each model, in order, and with what came of it.
    """
    sources = sources_of(options)
    outcomes: dict[int, tuple[Outcome, Said]] = {}
    taken = 0
    options.threads = cluster.threads
    options.folder, options.quiet = Path.cwd(), is_quiet()

    def evaluate(actor: Actor, number: int, lost: Mapping[int, str]) -> Future[Any]:
        if not lost:
            return actor.ask("evaluate", sources[number])
        given_up: Future[tuple[Outcome, Said]] = Future()
        error = AnomalyError(
            f"{sources[number]}: every process that trained or evaluated it crashed (out of "
            "memory?)"
        )
        given_up.set_result((error, ("", "")))
        return given_up

    def probe(actor: Actor, number: int, images: Sequence[int]) -> Future[Any]:
        return actor.ask("evaluate", sources[number] if images else None)

    with ProgressLine() as progress:

        def done(count: int, total: int) -> None:
            nonlocal taken
            progress("evaluating", count, total)
            while taken in outcomes:
                outcome, (out, err) = outcomes.pop(taken)
                print(out, end="")
                print(err, end="", file=sys.stderr)
                take(sources[taken], outcome)
                taken += 1

        remedy = "start it again: what is trained is kept"
        work = Work(
            lambda: cluster.start(_Evaluator, options), evaluate, probe, outcomes.__setitem__
        )
        each = [1] * len(sources)
        dispatch(range(len(sources)), each, work, cluster.room, progress=done, remedy=remedy)


class _Evaluator:
    """The actor."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def evaluate(self, source: Source | None) -> tuple[Outcome, Said] | None:
        """Train and evaluate a model; without one, nothing."""
        if source is None:
            return None
        with suppress(OSError):
            os.chdir(self._options.folder)
        logging.getLogger("anomaly.cli.logging_setup").setLevel(logging.WARNING)
        outcome: Outcome
        with (
            redirect_stdout(io.StringIO()) as out,
            redirect_stderr(io.StringIO()) as err,
            log_to_terminal(quiet=self._options.quiet),
        ):
            device, threads = device_and_threads(self._options)
            try:
                outcome = evaluate_source(source, self._options, device, threads)
            except AnomalyError as error:
                outcome = AnomalyError(str(error))
        return outcome, (out.getvalue(), err.getvalue())
