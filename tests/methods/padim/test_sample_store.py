import errno
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.errors import OutputError
from anomaly.methods.padim.accumulator import SampleStore

P, D = 7, 3
IMAGE = P * D * 4


def store_of(memory_limit, images=8):
    return SampleStore((images, P, D), torch.device("cpu"), memory_limit)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    limit=st.integers(-1, 12 * IMAGE),
    first=st.integers(0, P - 1),
    length=st.integers(1, P),
)
def test_reads_positions_of_what_was_appended(sizes, limit, first, length):
    store = store_of(limit, sum(sizes))
    for values in (0.0, 100.0):  # the second round after `clear`
        images = torch.arange(sum(sizes) * P * D, dtype=torch.float32).view(-1, P, D) + values
        for batch in images.split(sizes):
            store.append(batch)
            store.read(slice(0, 1))
        assert len(store) == len(images)
        assert store.nbytes <= max(0, limit)
        positions = slice(first, first + length)
        found = store.read(positions)
        np.testing.assert_array_equal(found, images.numpy()[:, positions].swapaxes(0, 1))
        store.clear()
        assert len(store) == store.nbytes == 0


@pytest.mark.parametrize("limit", [0, 10 * IMAGE])
def test_later_changes_of_a_batch_do_not_matter(limit):
    store = store_of(limit)
    wide = torch.ones(2, P, 2 * D)
    store.append(wide[..., ::2])
    wide.zero_()
    assert (store.read(slice(0, P)) == 1).all()


def test_memory_comes_first():
    store = store_of(5 * IMAGE)
    for expected in (2, 4, 4, 4):
        store.append(torch.ones(2, P, D))
        assert store.nbytes == expected * IMAGE


def test_full_disk_says_where_and_what_to_do(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match=r"TMPDIR sets: No space left on device"):
        store_of(0).append(torch.ones(2, P, D))
