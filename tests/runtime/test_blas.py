"""Numpy's products have one thread while they are ours, and theirs again afterwards."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from anomaly.imaging.geometry import AxisView, View
from anomaly.maps import anomaly_map
from anomaly.runtime.devices import CPU
from anomaly.runtime.parallel import in_parallel, one_blas_thread, parallel_map


def threads() -> set[int]:
    """Threads of numpy's OpenBLAS, of which other packages have copies; empty without one."""
    libraries = ThreadpoolController().select(internal_api="openblas").info()
    return {one["num_threads"] for one in libraries if "numpy" in one["filepath"]}


@pytest.fixture(autouse=True)
def _two_threads() -> object:
    if not threads():
        pytest.skip("numpy computes with another library than OpenBLAS here")
    with threadpool_limits(limits=2, user_api="blas"):
        yield


def test_a_block_gives_the_threads_back_whatever_happens_in_it() -> None:
    assert threads() == {2}
    with one_blas_thread():
        with one_blas_thread():
            assert threads() == {1}
        assert threads() == {1}
    assert threads() == {2}
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        1 / 0  # noqa: B018
    assert threads() == {2}


def test_blocks_of_several_threads_end_with_the_threads_there_were() -> None:
    for _ in range(20):
        inside = threading.Barrier(4)

        def other(inside: threading.Barrier = inside) -> None:
            with one_blas_thread():
                inside.wait(10)
            with one_blas_thread():
                pass

        others = [threading.Thread(target=other) for _ in range(4)]
        for one in others:
            one.start()
        for one in others:
            one.join()
        assert threads() == {2}


def test_blocks_that_overlap_end_with_the_last() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(one_blas_thread())
    second.enter_context(one_blas_thread())
    first.close()
    assert threads() == {1}
    second.close()
    assert threads() == {2}


def test_passes_side_by_side_and_maps_leave_numpys_threads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anomaly.runtime.parallel.get_threads", lambda: 2)
    assert parallel_map(lambda _: threads(), [1, 2], CPU) == [{1}, {1}]
    assert list(in_parallel(lambda _: threads(), [1, 2, 3], CPU)) == [{1}] * 3
    seen: list[set[int]] = []
    monkeypatch.setattr(anomaly_map, "np", Watched(seen))
    axis = AxisView(32, 32, 0, 32)
    anomaly_map.source_map(np.ones((4, 4), np.float32), View(axis, axis), 1.0)
    assert {1} in seen
    assert threads() == {2}


class Watched:
    """Numpy, which notes how many threads there are whenever it is asked for something."""

    def __init__(self, seen: list[set[int]]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> object:
        self._seen.append(threads())
        return getattr(np, name)
