import errno
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.errors import OutputError
from anomaly.scorers.spill import Spill


@settings(deadline=None)
@given(st.integers(0, 400), st.lists(st.integers(0, 30), max_size=12))
def test_hands_back_what_was_put(memory_limit, sizes):
    spill = Spill(memory_limit)
    values = [torch.arange(n, dtype=torch.float32).view(1, n) + i for i, n in enumerate(sizes)]
    for i, value in enumerate(values):
        spill.put(i, value.clone(), value + 1)
    for i in reversed(range(len(values))):
        first, second = spill.take(i)
        assert torch.equal(first, values[i])
        assert torch.equal(second, values[i] + 1)


def test_file_is_used_only_beyond_the_limit_and_its_room_again():
    spill = Spill(memory_limit=100)
    spill.put("a", torch.ones(20))
    assert spill.file_bytes == 0
    for round_ in range(5):
        for name in "bcd":
            spill.put(name, torch.full((20,), round_, dtype=torch.float64))
        assert all((spill.take(name)[0] == round_).all() for name in "bcd")
    assert spill.file_bytes == 3 * 160


def test_full_disk_says_where_and_what_to_do(monkeypatch):
    class Full:
        def seek(self, offset):
            return offset

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(OutputError, match=r"No space left on device.*TMPDIR"):
        Spill(memory_limit=0).put("a", torch.ones(3))


def test_key_is_handed_back_once():
    spill = Spill(memory_limit=100)
    spill.put("a", torch.ones(1))
    spill.take("a")
    with pytest.raises(KeyError):
        spill.take("a")
