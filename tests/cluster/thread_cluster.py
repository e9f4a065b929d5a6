"""A cluster whose actors are threads; what goes to them and comes back is copied."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from anomaly.cluster.workers import WorkerDied

_Dies = Callable[[str, tuple[Any, ...]], bool]


class ThreadCluster:
    """A cluster whose actors are threads; what goes to them and comes back is copied."""

    def __init__(self, workers: int, dies: _Dies = lambda method, arguments: False) -> None:
        self.workers = workers
        self._pool = ThreadPoolExecutor(8)
        self._dies = dies
        self.started = self.stopped = 0

    def room(self) -> int:
        return self.workers

    def put(self, value: Any) -> Any:
        return _copied(value)

    def start(self, kind: type, *arguments: Any) -> "_Actor":
        self.started += 1
        return _Actor(self, kind(*arguments))


class _Actor:
    def __init__(self, cluster: ThreadCluster, served: Any) -> None:
        self._cluster = cluster
        self._served = served
        self.placed = True

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        def act() -> Any:
            if self._cluster._dies(method, arguments):
                raise WorkerDied
            return _copied(getattr(self._served, method)(*_copied(arguments)))

        return self._cluster._pool.submit(act)

    def stop(self) -> None:
        self._cluster.stopped += 1


class Once:
    """The n-th call of some methods kills its worker."""

    def __init__(self, *pairs: Any) -> None:
        self.left = dict(zip(pairs[::2], pairs[1::2], strict=True))

    def __call__(self, method: str, arguments: tuple[Any, ...]) -> bool:
        left = self.left.get(method)
        if left is None:
            return False
        self.left[method] = left - 1
        return left == 0


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
