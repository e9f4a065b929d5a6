"""Backbone weights: found, checked, and each way of not having them told apart."""

import hashlib
import socket
import urllib.error
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from anomaly.backbones import weights
from anomaly.backbones.networks import read_weights
from anomaly.errors import WeightsError

STATE = {"conv.weight": torch.arange(6.0).reshape(2, 3), "bn.bias": torch.ones(2)}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("ANOMALY_WEIGHTS", raising=False)


def _official(folder: Path, state: dict[str, Tensor] = STATE) -> tuple[str, Path]:
    """A small file under the name that its hash asks for, and its official address."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "draft.pth"
    torch.save(state, draft)
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()
    name = f"tiny-{digest[:8]}.pth"
    return f"https://example.invalid/models/{name}", draft.rename(folder / name)


def own_state(file: str | Path) -> tuple[dict[str, Tensor], str]:
    """As a user's file is read."""
    path = weights.weights_file(str(file))
    assert path is not None
    return weights.read_state(path)


def _no_network(url: str) -> None:
    raise urllib.error.URLError("Name or service not known")


@pytest.mark.parametrize("place", ["own", "weights", "torch/hub/checkpoints"])
def test_an_official_file_on_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("ANOMALY_WEIGHTS", str(tmp_path / "own"))
    monkeypatch.setattr(weights, "_opened", _no_network)
    url, file = _official(tmp_path / place)
    state, sha256 = weights.official_state(url)
    assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert state.keys() == STATE.keys()
    assert torch.equal(state["conv.weight"], STATE["conv.weight"])


def test_a_missing_file_is_downloaded_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = _official(tmp_path / "server")
    # A file: address goes through the same download and the same hash check.
    state, _ = weights.official_state(source.as_uri())
    assert state.keys() == STATE.keys()
    assert (tmp_path / "torch" / "hub" / "checkpoints" / source.name).is_file()


def test_a_download_with_a_wrong_hash_is_refused_and_not_kept(tmp_path: Path) -> None:
    _, source = _official(tmp_path / "server")
    wrong = source.rename(source.with_name("tiny-00000000.pth"))
    with pytest.raises(WeightsError, match="wrong hash"):
        weights.official_state(wrong.as_uri())
    assert not any(path.is_file() for path in (tmp_path / "torch").rglob("*"))


def test_no_network_names_the_file_its_places_and_a_network_that_works_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(weights, "_opened", _no_network)
    monkeypatch.setenv("ANOMALY_WEIGHTS", str(tmp_path))
    with pytest.raises(WeightsError, match="can't be downloaded") as caught:
        read_weights("wide_resnet50_2", "imagenet", 0)
    said = str(caught.value)
    for part in ("wide_resnet50_2-95faca4d.pth", str(tmp_path), "weights", "checkpoints"):
        assert part in said
    assert "on this machine: --set backbone.name=timm/tf_efficientnet_l" in said
    (tmp_path / "resnet50-0676ba61.pth").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"on this machine: --set backbone.name=resnet50$"):
        read_weights("wide_resnet50_2", "imagenet", 0)


def test_a_silent_and_a_refusing_server_are_told_apart_from_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(url: str) -> None:
        raise urllib.error.HTTPError(url, 403, "Forbidden", None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(weights, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/tiny-00000000.pth"
        with pytest.raises(
            WeightsError, match=r"can't be downloaded .* \(no answer within 0.2 s\)"
        ):
            weights.official_state(url)
    monkeypatch.setattr(weights, "_opened", forbidden)
    with pytest.raises(WeightsError, match="answered 403 Forbidden"):
        weights.official_state(url)


def test_another_file_and_a_truncated_one_under_an_official_name(tmp_path: Path) -> None:
    url, file = _official(tmp_path / "weights")
    data = file.read_bytes()
    for share in (0.0, 0.3, 0.9):
        file.write_bytes(data[: int(share * len(data))])
        with pytest.raises(WeightsError, match="cut short or damaged"):
            weights.official_state(url)
    torch.save({"other": torch.zeros(3)}, file)
    with pytest.raises(WeightsError, match="isn't the official file"):
        weights.official_state(url)


def test_own_files_in_both_forms_also_under_the_others_name(tmp_path: Path) -> None:
    for name in ("own.safetensors", "under.pth"):
        save_file(STATE, tmp_path / name)
    torch.save({"state_dict": STATE, "epoch": 3}, tmp_path / "own.pth")
    torch.save(STATE, tmp_path / "under.safetensors")
    for name in ("own.bin", "old.safetensors"):
        torch.save(STATE, tmp_path / name, _use_new_zipfile_serialization=False)
    files = sorted(file for file in tmp_path.iterdir() if file.is_file())
    assert len(files) == 6
    for file in files:
        state, sha256 = own_state(file)
        assert torch.equal(state["bn.bias"], STATE["bn.bias"]), file
        assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    for file in files[2:]:
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(WeightsError, match="cut short or damaged"):
            own_state(file)


def test_own_files_that_cannot_be_meant(tmp_path: Path) -> None:
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "model.onnx").write_bytes(b"x")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pth")
    for file, says in (
        ("nowhere.pth", "doesn't exist"),
        ("folder.pth", "is a folder"),
        ("model.onnx", r"isn't a \.safetensors, \.pth, \.pt or \.bin file"),
        ("list.pth", "holds no state_dict"),
        ("whole.pth", "more than tensors"),
    ):
        with pytest.raises(WeightsError, match=says):
            own_state(file)
