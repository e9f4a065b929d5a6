"""Chunks of a job -> workers, any of which may die at any time. Imports no torch.

A chunk that has taken two workers with it is halved until the image that does it is alone; that
image is `failed`, and the chunk is scored without it. What is done is told by the parts on storage:
a job whose dispatcher died goes on with the chunks that have none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from anomaly.errors import OutputError

_DEATHS = 2  # of workers at one chunk; then it is looked into
_FRUITLESS = 3  # times that a chunk was looked into, and no image was found
_WAIT = 1.0  # seconds until it is asked again whether to stop, and whether there is room


class WorkerDied(Exception):  # noqa: N818, no mistake of anybody's
    """The worker's process, or its machine, is gone."""


class Worker(Protocol):
    """A process somewhere that has a model and does one thing at a time.

    Futures raise `WorkerDied`, or the `AnomalyError` that the worker has met.
    """

    def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
        """Score a chunk and write its part; `lost` images are failed, and why.

        The counts are those of statuses and verdicts.
        """

    def probe(self, chunk: int, images: Sequence[int]) -> Future[Counter[str]]:
        """Score some images of a chunk and write nothing: to see whether they kill it."""

    def stop(self) -> None:
        """End it."""


@dataclass
class _Chunk:
    """What is known of a chunk that isn't done.

    Attributes:
        number: of the manifest.
        remedy: what to do once it is mended that workers die.
        lost: its images that kill workers, by index, and what their rows say.
        deaths: of workers that scored it, since the last image was found.
        suspects: images among which one is looked for; None if none is.
        probed: those of them that a worker is being tried with.
        fruitless: times that it was looked into in vain.
    """

    number: int
    remedy: str
    lost: dict[int, str] = field(default_factory=dict)
    deaths: int = 0
    suspects: Sequence[int] | None = None
    probed: Sequence[int] = ()
    fruitless: int = 0

    def begin(self, worker: Worker) -> Future[Counter[str]]:
        """Give a worker the next thing that is to be done with this chunk."""
        if self.suspects is None:
            return worker.score(self.number, self.lost)
        return worker.probe(self.number, self.probed)

    def died(self, size: int) -> None:
        """A worker has died at it."""
        if self.suspects is None:
            self.deaths += 1
            if self.deaths == _DEATHS:
                self.suspects = [i for i in range(size) if i not in self.lost]
                self.probed = ()  # whether a worker lives that is given nothing
        elif not self.probed:
            raise OutputError(
                f"workers die at chunk {self.number} even without its images; see why in their "
                f"logs (out of memory?), then {self.remedy}"
            )
        elif len(self.probed) == 1:
            self.lost[self.probed[0]] = (
                "it took down the processes that scored it, whichever they were (out of memory?)"
            )
            self.suspects, self.deaths = None, 0
        else:
            self.suspects = self.probed
            self._halve()

    def survived(self) -> None:
        """A worker has lived through what was probed."""
        assert self.suspects is not None
        left = [i for i in self.suspects if i not in set(self.probed)]
        if left:
            self.suspects = left
            self._halve()
            return
        self.fruitless += 1
        self.suspects, self.deaths = None, 0
        if self.fruitless == _FRUITLESS:
            raise OutputError(
                f"chunk {self.number} took down {_FRUITLESS * _DEATHS} workers, and no single "
                f"image of it does; see why in their logs (out of memory?), then {self.remedy}"
            )

    def _halve(self) -> None:
        assert self.suspects is not None
        self.probed = self.suspects[: (len(self.suspects) + 1) // 2]


def dispatch(
    chunks: Iterable[int],
    sizes: Sequence[int],
    hire: Callable[[], Worker],
    room: Callable[[], int],
    *,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    remedy: str = "go on with --resume",
) -> Counter[str]:
    """Have chunks scored by as many workers as there is room for.

    Args:
        chunks: their numbers.
        sizes: images in each chunk of the manifest.
        hire: starts a worker; it needn't be ready yet.
        room: how many workers there may be now, which may change all the time.
        stopped: asked all the time; what is in hand is then given up.
        progress: called with images done, and how many there are to do.
        remedy: what to do once it is mended that workers die.

    Returns:
        Counts of statuses and verdicts of the chunks that were finished.

    Raises:
        AnomalyError: a worker has met it, or workers die whatever they are given; the parts that
            exist remain.
    """
    waiting = deque(_Chunk(chunk, remedy) for chunk in chunks)
    total, done = sum(sizes[chunk.number] for chunk in waiting), 0
    idle: list[Worker] = []
    busy: dict[Future[Counter[str]], tuple[Worker, _Chunk]] = {}
    counts: Counter[str] = Counter()
    try:
        while (waiting or busy) and not stopped():
            while waiting and (idle or len(busy) < max(1, room())):
                worker, chunk = idle.pop() if idle else hire(), waiting.popleft()
                busy[chunk.begin(worker)] = worker, chunk
            while idle and not waiting:  # one that waits for its place gets it
                idle.pop().stop()
            for future in wait(busy, _WAIT, FIRST_COMPLETED).done:
                worker, chunk = busy.pop(future)
                idle.append(worker)
                try:
                    found = future.result()
                except WorkerDied:
                    idle.pop().stop()
                    chunk.died(sizes[chunk.number])
                    waiting.appendleft(chunk)
                    continue
                if chunk.suspects is not None:
                    chunk.survived()
                    waiting.appendleft(chunk)
                    continue
                counts += found
                done += sizes[chunk.number]
                progress(done, total)
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.stop()
    return counts
