"""Model folders that were tampered with: refused with a clear message, or never a false verdict.

Every value of every file is changed in turn, with all hashes corrected, as a faulty program would
leave it; what still loads must say what the model said before, or nothing.
"""

import copy
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import RUNS
from safetensors.torch import load_file, save
from torch import Tensor

from anomaly.config.load import GONE
from anomaly.errors import LayerError, ModelError
from anomaly.files.writing import as_json
from anomaly.imaging.loading import UnusableImage
from anomaly.scoring.build import scorer_of
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.model import Model
from anomaly.scoring.prediction import Prediction
from anomaly.storage.folder import file_entry, model_id, read_manifest
from anomaly.storage.load import load_model
from anomaly.storage.thresholds import read_thresholds, replace_thresholds

DELETED = object()
VALUES = [DELETED, None, [], {}, [[1]], {"a": {"b": 1}}, -1, 0, 10**40, 10**400, 1e300, True, "x"]
VALUES += [math.nan]
FEW = [DELETED, None, [[1]], -1, "x"]
# Entries of a manifest that can have other legal values without anything else showing it.
FREE = {
    *("software_version", "packages", "python", "machine", "device", "threads"),
    *("training_images", "refused_images", "weights_sha256", "aspect", "mean", "std"),
}


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


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside; of long lists and mappings to the first two."""
    yield way
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if len(keys) < 20 and isinstance(value, dict) else keys[:2]:
            yield from places(value[key], (*way, key))


def mutants(values: Any, news: list[Any] = VALUES) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Copies with one value changed, each with the way to it."""
    for way in places(values):
        for new in news:
            if not way:
                if new is not DELETED:
                    yield way, new
                continue
            mutant = copy.deepcopy(values)
            inner = mutant
            for key in way[:-1]:
                inner = inner[key]
            if new is DELETED:
                del inner[way[-1]]
            else:
                inner[way[-1]] = new
            if mutant != values:
                yield way, mutant


def check_message(error: ModelError, folder: Path) -> None:
    """It says where, and what to do, in words of our own."""
    message = str(error)
    assert str(folder) in message
    assert any(word in message for word in ("again", "remove it", "give a folder"))
    assert not any(word in message for word in ("pydantic", "Error", "Traceback", "Input should"))


def attempt(folder: Path) -> Model | None:
    """The detector of a folder; None where it is refused."""
    try:
        return load_model(folder)
    except ModelError as error:
        check_message(error, folder)
        return None


def score(folder: Path, image: Path) -> tuple[float, str] | None:
    """Score and verdict of an image; None where the model is refused, by loading or computing."""
    try:
        found = detector.predict([image])[0] if (detector := attempt(folder)) else None
    except LayerError:
        return None
    return (found.score, found.verdict) if isinstance(found, Prediction) else None


def test_each_value_of_a_manifest(bank: Path, product: Path) -> None:
    image = product / "test" / "spot" / "000.png"
    before = score(bank, image)
    assert before is not None
    passed: set[tuple[Any, ...]] = set()
    for way, mutant in mutants(manifest_of(bank)):
        seal(bank, mutant)
        try:
            read_manifest(bank)
        except ModelError as error:
            check_message(error, bank)
            continue
        if not set(way) & FREE and way not in passed:
            passed.add(way)
            if after := score(bank, image):
                assert after[0] == pytest.approx(before[0], rel=1e-5), (way, mutant)
                assert after[1] == before[1], (way, mutant)
    assert len(passed) < 40


def test_each_value_of_a_truncation(resnet_folder: Path, product: Path, tmp_path: Path) -> None:
    model, image = tmp_path / "model", product / "test" / "spot" / "000.png"
    shutil.copytree(resnet_folder / "model", model)
    before, whole, loaded = score(model, image), manifest_of(model), 0
    assert before is not None
    parts = {key: whole["backbone"][key] for key in ("dropped", "axes", "copies", "folded")}
    for way, part in mutants(parts, [DELETED, [[1]], "x"]):
        if not isinstance(part, dict):
            continue
        others = {key: value for key, value in whole["backbone"].items() if key not in parts}
        seal(model, whole | {"backbone": others | part})
        if after := score(model, image):
            assert after[0] == pytest.approx(before[0], rel=1e-5), (way, part)
            loaded += 1
    assert loaded < 10
    # What the schema takes, and doesn't fit the network.
    backbone = whole["backbone"]
    pairs, layers = backbone["folded"], backbone["layers"]
    mixed = [pairs[0][0], pairs[-1][1]]  # a convolution with a norm of another width
    for unfit in (
        *({"folded": folded} for folded in ([*pairs, pairs[0]], [mixed, *pairs[1:]])),
        {"dropped": [*backbone["dropped"], "layer2.0.conv1"]},
        {"axes": ["channels_last" for _ in layers]},
        *({"layers": others} for others in (["layer1", *layers], layers[1:], ["fc", "x"])),
    ):
        seal(model, whole | {"backbone": backbone | unfit})
        assert score(model, image) is None, unfit


def test_each_value_of_the_thresholds(bank: Path) -> None:
    for name in ("thresholds.json", "calibration.json"):
        before = (bank / name).read_text()
        for way, mutant in mutants(json.loads(before)):
            (bank / name).write_text(json.dumps(mutant))
            try:
                after = read_thresholds(bank)
            except ModelError as error:
                check_message(error, bank)
                continue
            assert after is not None
            numbers = (after.image, after.review, after.pixel, *after.good.image)
            assert all(map(math.isfinite, numbers)), (way, mutant)
            assert after.review <= after.image
            after.lines()
        (bank / name).write_text(before)


def test_settings_that_are_none(bank: Path) -> None:
    values = yaml.safe_load((bank / "config.yaml").read_text())
    texts = ["[" * 3000, "a: [", "\x00", "- 1", "null", "word"]
    for section in ("backbone", "model"):
        for _, part in mutants(values[section], FEW):
            texts.append(yaml.safe_dump(values | {section: part}))
    for text in texts:
        put(bank / "config.yaml", text)
        loaded = attempt(bank)
        assert loaded is None or text not in texts[:6]


def test_settings_and_scores_of_what_went_are_refused_in_a_sentence(bank: Path) -> None:
    settings, file = (bank / "config.yaml").read_text(), bank / "calibration.json"
    put(bank / "config.yaml", f"{settings}zones: {{edge: {{reject_rate: 0.1}}}}\n")
    with pytest.raises(ModelError, match=re.escape(GONE["zones"])):
        load_model(bank)
    put(bank / "config.yaml", settings)
    scores = json.loads(file.read_text())
    image = [0, "a.png", 1.0, 1.0, "", [1.0]]
    for columns in ({"zones": [["edge", 0.1, scores["image"]]]}, {"left_out": [image]}):
        put(file, json.dumps(scores | columns))
        with pytest.raises(ModelError, match="calibration") as caught:
            load_model(bank)
        check_message(caught.value, bank)


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
    scorer_of(config, whole, torch.device("cpu"))
    for what, tensors in tampered(whole):
        # Spacing is asked for where the settings want it; a projection cut is of another network.
        if what in ("spacing missing", "projection cut"):
            continue
        with pytest.raises(ModelError):
            scorer_of(config, tensors, torch.device("cpu"))


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


def test_kinds_of_numbers_that_no_model_has(bank: Path) -> None:
    for name in ("scorer", "backbone", "usual"):
        file = bank / f"{name}.safetensors"
        whole = load_file(file)
        key = next(k for k, tensor in whole.items() if tensor.is_floating_point() and tensor.ndim)
        for kind in ("float8_e4m3fn", "bfloat16", "complex64", "float4_e2m1fn_x2"):
            odd = torch.zeros(whole[key].shape, dtype=torch.uint8)
            number = getattr(torch, kind)
            odd = odd.view(number) if "float4" in kind else odd.to(number)
            put(file, whole | {key: odd})
            with pytest.raises(ModelError, match=r"train (it )?again") as caught:
                load_model(bank)
            check_message(caught.value, bank)
        put(file, whole)


def test_files_that_are_cut_or_nothing_like_it(bank: Path) -> None:
    for name in ("scorer.safetensors", "backbone.safetensors", "manifest.json"):
        file = bank / name
        whole = file.read_bytes()
        replace = Path.write_bytes if name == "manifest.json" else put
        half = whole[: len(whole) // 2]
        for data in (b"", whole[:9], half, whole[:-1], b"[" * 200_000, b"\xff" * 64):
            replace(file, data)
            assert attempt(bank) is None
        replace(file, whole)
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError):
        load_model(bank)


def test_values_that_overflow_give_no_verdict(bank: Path, product: Path) -> None:
    """A network whose numbers are finite until it runs."""
    tensors = load_file(bank / "backbone.safetensors")
    tensors["conv1.weight"] = tensors["conv1.weight"] * 1e38
    put(bank / "backbone.safetensors", tensors)
    for found in load_model(bank).results(sorted((product / "test").rglob("*.png"))):
        assert isinstance(found, UnusableImage)
        assert (found.status, "isn't a finite number" in found.reason) == ("failed", True)


def test_one_broken_patch_is_enough(bank: Path, product: Path) -> None:
    """The highest of the other patches must not stand for the image."""
    detector = load_model(bank)
    (item,) = detector.predict([product / "test" / "good" / "000.png"])
    assert isinstance(item, Prediction)
    grid = detector.embedder.grid(item.view.size)
    embeddings = torch.zeros(2, *grid, detector.scorer.dimensions)
    embeddings[1, 0, 0] = math.nan
    _, scores = detector.score_patches(embeddings, [(item.view, (0, 0), 0)] * 2)
    assert scores.isfinite().tolist() == [True, False]


def test_a_manifest_vouches_for_itself(bank: Path) -> None:
    file = bank / "manifest.json"
    text = file.read_text()
    assert "0.485" in text
    for changed in (text.replace("0.485", "0.484"), text.replace("\n", "\r\n")):
        file.write_text(changed)
        with pytest.raises(ModelError, match=r"manifest\.json was changed since it was written"):
            load_model(bank)
    file.write_text(text)
    load_model(bank)


def test_new_thresholds_are_vouched_for(bank: Path) -> None:
    thresholds = read_thresholds(bank)
    assert thresholds is not None
    (bank / "history.jsonl").write_bytes(b"\xff\n")
    after = replace_thresholds(bank, thresholds, {"asked": {}})
    again = load_model(bank)
    assert again.model_id == after == model_id(bank)
    assert again.thresholds == thresholds
    assert (bank / "history.jsonl").read_bytes().startswith(b"\xff\n")
