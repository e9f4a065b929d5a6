"""Numpy's products have one thread while they are ours, and theirs again afterwards."""

from contextlib import ExitStack

import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from anomaly.runtime import CPU, in_parallel, one_blas_thread, parallel_map


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


def test_blocks_give_the_threads_back_with_the_last_whatever_happens() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(one_blas_thread())
    second.enter_context(one_blas_thread())
    first.close()
    assert threads() == {1}
    second.close()
    assert threads() == {2}
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        1 / 0  # noqa: B018
    assert threads() == {2}


def test_passes_side_by_side_have_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anomaly.runtime.get_threads", lambda: 2)
    assert parallel_map(lambda _: threads(), [1, 2], CPU) == [{1}, {1}]
    assert list(in_parallel(lambda _: threads(), [1, 2, 3], CPU)) == [{1}] * 3
    assert threads() == {2}
