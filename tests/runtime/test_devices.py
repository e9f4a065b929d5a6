"""Devices: what is meant by a name, and which names can't be."""

import pytest
import torch

from anomaly.errors import AnomalyError
from anomaly.runtime import device_of


def test_devices_by_name_and_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of("auto") == torch.device("cuda")
    assert device_of("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == device_of(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(AnomalyError, match="device cuda: torch finds no usable GPU here"):
        device_of("cuda")
    for name in ("mps", "xpu:0", "meta", "gpu", "cuda:x", ""):
        with pytest.raises(AnomalyError, match="give 'auto', 'cpu' or 'cuda'"):
            device_of(name)
