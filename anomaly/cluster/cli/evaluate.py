"""`anomaly evaluate --ray`: models trained and evaluated side by side on a cluster."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli.common_options import device_and_threads
from anomaly.cli.evaluate import evaluate_source, sources
from anomaly.cli.logging_setup import ProgressLine, is_quiet, log_to_terminal
from anomaly.cluster.actors import dispatch, then
from anomaly.errors import AnomalyError

if TYPE_CHECKING:
    from anomaly.cli.evaluate import Source
    from anomaly.cluster.actors import Actor, Cluster
    from anomaly.report.category import Category

    Outcome = Category | AnomalyError
    Said = tuple[str, str]  # on stdout and stderr


def run(
    options: argparse.Namespace, cluster: Cluster, take: Callable[[Source, Outcome], None]
) -> None:
    """Evaluate every model that the options name.

    Args:
        options: of `anomaly evaluate`.
        cluster: where the workers are.
        take: called with each model, in order, and with what came of it.
    """
    models = sources(options)
    outcomes: dict[int, tuple[Outcome, Said]] = {}
    taken = 0
    options.threads = cluster.threads
    options.folder, options.quiet = Path.cwd(), is_quiet()

    def hire() -> _Worker:
        return _Worker(cluster.start(_Evaluator, options), models, outcomes)

    with ProgressLine() as progress:

        def done(count: int, total: int) -> None:
            nonlocal taken
            progress("evaluating", count, total)
            while taken in outcomes:
                outcome, (out, err) = outcomes.pop(taken)
                print(out, end="")
                print(err, end="", file=sys.stderr)
                take(models[taken], outcome)
                taken += 1

        remedy = "start it again: what is trained is kept"
        each = [1] * len(models)
        dispatch(range(len(models)), each, hire, cluster.room, progress=done, remedy=remedy)


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
            outcome = evaluate_source(source, self._options, device, threads)
            if isinstance(outcome, AnomalyError):
                outcome = AnomalyError(str(outcome))  # others may not be picklable
        return outcome, (out.getvalue(), err.getvalue())


class _Worker:
    def __init__(
        self,
        actor: Actor,
        sources: Sequence[Source],
        outcomes: dict[int, tuple[Outcome, Said]],
    ) -> None:
        self._actor = actor
        self._sources = sources
        self._outcomes = outcomes
        self.stop = actor.stop

    def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
        """Have the actor evaluate a source; one that takes down its workers is given up."""
        if lost:
            error = AnomalyError(
                f"{self._sources[chunk]}: training or evaluating it took down the processes that "
                "did, whichever they were (out of memory?)"
            )
            self._outcomes[chunk] = error, ("", "")
            nothing: Future[Counter[str]] = Future()
            nothing.set_result(Counter())
            return nothing

        def kept(outcome: tuple[Outcome, Said]) -> Counter[str]:
            self._outcomes[chunk] = outcome
            return Counter()

        return then(self._actor.ask("evaluate", self._sources[chunk]), kept)

    def probe(self, chunk: int, images: Sequence[int]) -> Future[Counter[str]]:
        """Have the actor evaluate a source, to see whether it survives that."""
        return self._actor.ask("evaluate", self._sources[chunk] if images else None)
