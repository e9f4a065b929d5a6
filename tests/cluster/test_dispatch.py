"""Images are shared out among workers that die: in threads here, in Ray's processes elsewhere."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
from thread_cluster import ThreadCluster

from anomaly.cluster.workers import Cluster, Workers, joined
from anomaly.errors import AnomalyError, OutputError
from anomaly.runtime import StoppedError

_SIZE = 17


class _Repeats:
    """An actor that repeats the images it is given."""

    def repeat(self, images: list[int]) -> list[int]:
        return images


class _Machines(ThreadCluster):
    """A cluster whose actors die at some sets of images, and that knows what was handled."""

    def __init__(self, dies: Callable[[set[int]], bool], workers: int = 3) -> None:
        super().__init__(workers, self._handle)
        self._deadly = dies
        self.handled: Counter[int] = Counter()  # by the first image

    def _handle(self, method: str, arguments: tuple[list[int]]) -> bool:
        (images,) = arguments
        dies = self._deadly(set(images))
        if len(images) > 1 and not dies:
            self.handled[images[0] // _SIZE] += 1
        return dies


def _units(count: int) -> list[range]:
    return [range(i * _SIZE, (i + 1) * _SIZE) for i in range(count)]


def _shared_out(
    cluster: Any, units: Iterable[Sequence[int]], **more: Any
) -> Iterator[tuple[list[int], list[int]]]:
    workers = Workers(cluster, _Repeats)
    yield from workers.share_out(units, lambda worker, images: worker.ask("repeat", images), **more)
    workers.close()


def test_each_unit_is_handled_once_and_in_order_by_no_more_workers_than_there_is_room_for() -> None:
    machines, units = _Machines(lambda _: False), _units(38)
    read: list[int] = []

    def given() -> Iterator[range]:
        for unit in units:
            read.append(unit[0])
            yield unit

    for number, (result, lost) in enumerate(_shared_out(machines, given())):
        assert (result, lost) == (list(units[number]), [])
        assert len(read) <= number + 3 * 3  # no further ahead
    assert machines.handled == dict.fromkeys(range(38), 1)
    assert machines.started == machines.stopped == 3


def test_images_that_kill_workers_are_found_and_the_others_handled() -> None:
    for poison in ({51}, {56, 57, 62, 76}, set(range(51, 68)), {0, 1, 16, 17, 101}):
        machines, units = _Machines(lambda images, of=poison: bool(of & images)), _units(6)
        for unit, (result, lost) in zip(units, _shared_out(machines, units), strict=True):
            assert {unit[place] for place in lost} == poison & {*unit}
            assert result == [image for image in unit if image not in poison]
        assert machines.stopped == machines.started


def test_a_unit_that_kills_only_as_a_whole_ends_the_job() -> None:
    machines = _Machines(lambda images: 40 in images and len(images) == _SIZE)
    with pytest.raises(OutputError, match="17 images crashed 4 workers, but none of them"):
        list(_shared_out(machines, _units(4)))
    assert machines.stopped >= machines.started - 3


def test_workers_come_and_go_with_the_room_for_them() -> None:
    machines = _Machines(lambda _: False, workers=0)  # one is always asked for
    for number, _ in enumerate(_shared_out(machines, _units(20))):
        machines.workers = 4 if number > 10 else 0
    assert machines.handled == dict.fromkeys(range(20), 1)
    assert 1 <= machines.started <= 4


def test_it_stops_when_it_is_told_to() -> None:
    machines, results = _Machines(lambda _: False, workers=1), []
    with pytest.raises(StoppedError):
        results.extend(
            _shared_out(machines, _units(40), stopped=lambda: len(machines.handled) >= 3)
        )
    assert len(machines.handled) < 10


def test_workers_that_wait_for_a_place_get_it_once_others_have_nothing_to_do() -> None:
    places = Semaphore(1)

    class Waiting:
        """One that has a place only once another has been stopped."""

        placed = has_place = False

        def ask(self, method: str, images: Sequence[int]) -> Future[list[int]]:
            def act() -> list[int]:
                if not self.has_place:
                    assert places.acquire(timeout=20)
                    self.has_place = True
                return list(images)

            return threads.submit(act)

        def stop(self) -> None:
            if self.has_place:
                places.release()

    threads = ThreadPoolExecutor(8)
    cluster = SimpleNamespace(room=lambda: 4, start=lambda kind: Waiting())
    assert [result for result, _ in _shared_out(cluster, _units(6))] == [*map(list, _units(6))]


def test_there_is_room_for_as_many_as_have_processors_and_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for there, device, room in (
        ([{"CPU": 16.0, "GPU": 1.0}], "cuda", 1),
        ([{"CPU": 16.0, "GPU": 1.0}], "cpu", 16),
        ([{"CPU": 4.0, "GPU": 8.0}], "cuda", 4),
        ([{"CPU": 16.0}], "cuda", 0),
        ([{"CPU": 1.5}, {"CPU": 1.5}], "cpu", 2),  # not 3: none is spread over two
        ([{"CPU": 16.0}, {"GPU": 4.0}], "cuda", 0),
    ):
        monkeypatch.setitem(sys.modules, "ray", _ray_of(*there))
        assert Cluster(device).room() == room, there


def _ray_of(*there: dict[str, float]) -> SimpleNamespace:
    """What asks Ray for its machines, one of which is gone."""
    nodes = [{"Alive": True, "Resources": one} for one in there]
    gone = {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}}
    ended = SimpleNamespace(said=False)
    return SimpleNamespace(
        nodes=lambda: [*nodes, gone],
        init=lambda address, **options: None,
        shutdown=lambda: setattr(ended, "said", True),
        ended=ended,
    )


def test_a_cluster_without_room_for_any_worker_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers would wait for ever, and nobody knew for what."""
    monkeypatch.setitem(sys.modules, "ray", ray := _ray_of({"CPU": 2.0}, {"CPU": 2.0}))
    with joined("head:1", "cpu") as cluster:
        assert cluster.room() == 4
    assert not caplog.messages
    with joined("head:1", "cuda") as cluster:
        assert cluster.room() == 0
    assert "head:1 has a free GPU" in caplog.messages[-1]
    ray.ended.said = False
    here = joined("local", "cuda")
    with pytest.raises(AnomalyError, match="Ray finds no GPU on this machine"), here:
        pass
    assert ray.ended.said
