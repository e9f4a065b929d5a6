"""Work handed to threads: in order, once each, with settings left as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from anomaly.runtime import (
    apply_thread_limit,
    in_parallel,
    locked_cached_property,
    parallel_map,
    parallel_pool,
)

CPU = torch.device("cpu")


def lanes(task: Callable[[Any], Any], items: Iterable[Any], device: torch.device) -> list[Any]:
    return list(in_parallel(task, items, device))


WAYS = (parallel_map, lanes)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Torch's threads, which are as many afterwards."""
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("way", WAYS)
def test_results_in_the_order_of_the_items(way: Callable[..., list[Any]]) -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (0, 1, 2, 57):
            assert way(lambda i: i * i, range(count), CPU) == [i * i for i in range(count)]
    names = way(lambda _: threading.current_thread().name, range(9), torch.device("cuda"))
    assert set(names) == {threading.current_thread().name}  # a GPU takes one after another
    assert lanes(lambda _: torch.get_num_threads(), [0], CPU) == [2]  # one item alone has all


@pytest.mark.parametrize("way", WAYS)
def test_each_thread_computes_alone_and_the_setting_comes_back(
    way: Callable[..., list[Any]],
) -> None:
    both = threading.Barrier(2, timeout=60)
    way(lambda _: both.wait(), range(2), CPU)  # one thread alone would wait for ever
    assert set(way(lambda _: torch.get_num_threads(), range(20), CPU)) == {1}
    assert threading.get_ident() not in way(lambda _: threading.get_ident(), range(20), CPU)
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2
    with pytest.raises(ZeroDivisionError):
        way(lambda i: 1 // (13 - i), range(30), CPU)


def test_a_thread_that_comes_while_others_compute_alone_has_all_threads() -> None:
    def caller() -> int:
        apply_thread_limit()
        return torch.get_num_threads()

    with parallel_pool(CPU), ThreadPoolExecutor(1) as other:
        assert other.submit(caller).result() == 2
        assert torch.get_num_threads() == 1


def test_inference_mode_holds_in_all_threads() -> None:
    for inference in (True, False):
        with torch.inference_mode(inference), parallel_pool(CPU) as hand_out:
            results = hand_out(lambda i: torch.zeros(3) + i, range(20))
        assert {t.is_inference() for t in results} == {inference}


def test_no_further_ahead_than_there_are_lanes() -> None:
    asked: list[int] = []

    def source() -> Iterator[int]:
        for i in range(50):
            asked.append(i)
            yield i

    results = in_parallel(lambda i: i, source(), CPU)
    next(results)
    assert len(asked) <= 4
    results.close()  # the rest is dropped


def test_errors_of_lanes_arrive_where_the_result_would_have() -> None:
    results = in_parallel(lambda i: 1 // (3 - i), range(6), CPU)
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


class _Owner:
    made = 0

    @locked_cached_property
    def costly(self) -> list[int]:
        """What it is."""
        self.made += 1
        time.sleep(0.05)
        return [self.made]


def test_a_property_that_threads_ask_for_is_made_once_for_each_owner() -> None:
    owner, together = _Owner(), threading.Barrier(8)

    def ask(_: int) -> list[int]:
        together.wait(10)
        return owner.costly

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert owner.made == 1
    assert all(one is owner.costly for one in found)
    assert _Owner().costly is not owner.costly
    assert _Owner.__dict__["costly"].__doc__ == "What it is."
