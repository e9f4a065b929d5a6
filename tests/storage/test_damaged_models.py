"""Model folders that were tampered with: refused with a clear message, or never a false verdict.

The manifest holds the hash of each file and its own. Tensors that don't fit are refused even where
the hashes were made right.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RUNS
from safetensors.torch import load_file, save
from torch import Tensor

from anomaly.config.load import GONE
from anomaly.errors import ModelError
from anomaly.files.writing import as_json
from anomaly.imaging.loading import UnusableImage
from anomaly.scoring.build import scorer_of
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.model import Model
from anomaly.storage.folder import file_entry, model_id
from anomaly.storage.models import load_model
from anomaly.storage.models import save as save_model
from anomaly.storage.thresholds import read_thresholds


@pytest.fixture
def bank(run_folder: Path, tmp_path: Path) -> Path:
    """A copy of a PatchCore model's folder."""
    shutil.copytree(run_folder / "model", tmp_path / "model")
    return tmp_path / "model"


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest without its own hash."""
    values: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    del values["manifest_sha256"]
    return values


def seal(folder: Path, values: Any) -> None:
    """Write a manifest with its own hash made right."""
    try:
        seal = {"manifest_sha256": hashlib.sha256(as_json(values).encode()).hexdigest()}
        (folder / "manifest.json").write_text(as_json(values | seal))
    except (ValueError, TypeError):  # NaN, or no mapping
        (folder / "manifest.json").write_text(json.dumps(values))


def put(file: Path, content: str | bytes | dict[str, Tensor]) -> None:
    """Replace a file of a model, and make the manifest fit."""
    if isinstance(content, dict):
        content = save(content)
    file.unlink()  # tensors may still lie in it
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    values = manifest_of(file.parent)
    values["files"][file.name] = file_entry(file)
    seal(file.parent, values)


def check_message(error: ModelError, folder: Path) -> None:
    """It says where, and what to do, in words of our own."""
    message = str(error)
    assert str(folder) in message
    assert any(word in message for word in ("again", "remove it", "give the folder"))
    assert not any(word in message for word in ("pydantic", "Error", "Traceback", "Input should"))


def attempt(folder: Path) -> Model | None:
    """The detector of a folder; None where it is refused."""
    try:
        return load_model(folder)
    except ModelError as error:
        check_message(error, folder)
        return None


def test_settings_that_are_none(bank: Path) -> None:
    for text in ("[" * 3000, "a: [", "\x00", "- 1", "null", "word", "model: {kind: x}"):
        put(bank / "config.yaml", text)
        assert attempt(bank) is None


def test_settings_of_what_went_are_refused_in_a_sentence(bank: Path) -> None:
    settings = (bank / "config.yaml").read_text()
    put(bank / "config.yaml", f"{settings}zones: {{edge: {{reject_rate: 0.1}}}}\n")
    with pytest.raises(ModelError, match=re.escape(GONE["zones"])):
        load_model(bank)


def tampered(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Copies with one tensor changed, missing or added."""
    yield "another", tensors | {"another": torch.zeros(3)}
    for name, tensor in tensors.items():
        rest = {k: v for k, v in tensors.items() if k != name}
        yield f"{name} missing", rest
        yield f"{name} wrapped", tensors | {name: tensor[None]}
        other = torch.float16 if tensor.dtype != torch.float16 else torch.int8
        yield f"{name} {other}", tensors | {name: tensor.to(other)}
        if tensor.ndim:
            yield f"{name} cut", tensors | {name: tensor[:-1].clone()}
            yield f"{name} empty", tensors | {name: tensor[:0].clone()}
        if tensor.is_floating_point():
            for bad in (math.nan, math.inf, -math.inf):
                spoilt = tensor.clone()
                spoilt.view(-1)[-1] = bad
                yield f"{name} with {bad}", tensors | {name: spoilt}


@pytest.mark.parametrize("kind", RUNS)
def test_each_tensor_of_the_scorer(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(request.getfixturevalue(RUNS[kind]) / "model", model)
    config = load_model(model).config
    whole = load_file(model / "scorer.safetensors")
    put(model / "scorer.safetensors", whole | {"another": torch.zeros(3)})
    assert attempt(model) is None
    scorer_of(config, whole)
    for what, tensors in tampered(whole):
        # Spacing is asked for where the settings want it; a projection cut is of another network.
        if what in ("spacing missing", "projection cut"):
            continue
        with pytest.raises(ModelError):
            scorer_of(config, tensors)


def test_each_tensor_of_the_training_images_look(bank: Path) -> None:
    whole = load_file(bank / "usual.safetensors")
    TrainingStatistics.from_tensors({k: v.numpy() for k, v in whole.items()}, 12)
    for what, tensors in tampered(whole):
        if what != "farthest cut":  # as many as there were
            with pytest.raises(ModelError):
                TrainingStatistics.from_tensors({k: v.numpy() for k, v in tensors.items()}, 12)


def test_tensors_of_the_network(bank: Path) -> None:
    whole = load_file(bank / "backbone.safetensors")
    names = ["conv1.weight", "bn1.running_var"]
    for what, part in tampered({k: whole[k] for k in names}):
        if "float16" in what:
            continue  # widened
        rest = {k: v for k, v in whole.items() if k not in names}
        put(bank / "backbone.safetensors", rest | part)
        assert attempt(bank) is None, what


def test_files_that_are_cut_changed_or_not_there(bank: Path) -> None:
    for file in sorted(bank.iterdir()):
        whole = file.read_bytes()
        changed = whole[:-1] + bytes([255 - whole[-1]])
        others = (b"", whole[:9], whole[: len(whole) // 2], whole[:-1], changed)
        for data in (*others, b"[" * 200_000, b"\xff" * 64):
            file.write_bytes(data)
            assert attempt(bank) is None, (file, data[:20])
        file.unlink()
        assert attempt(bank) is None
        file.write_bytes(whole)
    (bank / "scorer.safetensors").unlink()
    (bank / "scorer.safetensors").mkdir()
    assert attempt(bank) is None


def test_values_that_overflow_give_no_verdict(bank: Path, product: Path) -> None:
    """A network whose numbers are finite until it runs."""
    tensors = load_file(bank / "backbone.safetensors")
    tensors["conv1.weight"] = tensors["conv1.weight"] * 1e38
    put(bank / "backbone.safetensors", tensors)
    for found in load_model(bank).results(sorted((product / "test").rglob("*.png"))):
        assert isinstance(found, UnusableImage)
        assert (found.status, "isn't a finite number" in found.reason) == ("failed", True)


def test_a_manifest_vouches_for_itself(bank: Path) -> None:
    file = bank / "manifest.json"
    text = file.read_text()
    assert "0.485" in text
    for old, new, says in (
        ("0.485", "0.484", "was changed since it was written"),
        ("\n", "\r\n", "was changed since it was written"),
        ("anomaly-model/", "anomaly-model/1", "has the format 'anomaly-model/1"),
    ):
        file.write_text(text.replace(old, new))
        with pytest.raises(ModelError, match=rf"manifest\.json {says}"):
            load_model(bank)
    file.write_text(text)
    load_model(bank)


def test_new_thresholds_are_vouched_for(bank: Path) -> None:
    thresholds = read_thresholds(bank)
    assert thresholds is not None
    (bank / "history.jsonl").write_bytes(b"\xff\n")
    changed = replace(load_model(bank), changes=({"asked": {}},))
    after = save_model(changed, bank, overwrite=True)
    again = load_model(bank)
    assert again.model_id == after == model_id(bank)
    assert again.thresholds == thresholds
    assert (bank / "history.jsonl").read_bytes().startswith(b"\xff\n")
