import errno
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.errors import OutputError
from anomaly.methods.padim.accumulator import SampleStore

P, D = 7, 3
IMAGE = P * D * 4


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    limit=st.integers(-1, 12 * IMAGE),
    first=st.integers(0, P - 1),
    length=st.integers(1, P),
)
def test_reads_positions_of_what_was_appended(sizes, limit, first, length):
    store = SampleStore(P, D, torch.device("cpu"))
    for values in (0.0, 100.0):  # the second round after `clear`
        images = torch.arange(sum(sizes) * P * D, dtype=torch.float32).view(-1, P, D) + values
        for batch in images.split(sizes):
            store.append(batch, limit)
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
    store = SampleStore(P, D, torch.device("cpu"))
    wide = torch.ones(2, P, 2 * D)
    store.append(wide[..., ::2], limit)
    wide.zero_()
    assert (store.read(slice(0, P)) == 1).all()


def test_memory_comes_first():
    store = SampleStore(P, D, torch.device("cpu"))
    for expected in (2, 4, 4, 4):
        store.append(torch.ones(2, P, D), 5 * IMAGE)
        assert store.nbytes == expected * IMAGE


def test_full_disk_says_where_and_what_to_do(monkeypatch):
    class Full:
        def seek(self, offset):
            return offset

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    store = SampleStore(P, D, torch.device("cpu"))
    with pytest.raises(OutputError, match=r"No space left on device.*TMPDIR"):
        store.append(torch.ones(2, P, D), 0)


def test_a_part_of_a_larger_tensor_is_copied():
    """Kept as it is, it would keep all of the tensor; one that is whole is kept."""
    store, images = SampleStore(P, D, torch.device("cpu")), torch.ones(4, P, D)
    for batch in (images, images[:2]):
        store.append(batch, 100 * IMAGE)
        batch += 1
    assert store.read(slice(None))[0, :, 0].tolist() == [3, 3, 2, 2, 2, 2]
