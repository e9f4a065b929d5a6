"""Parts missing, surplus or swapped: histograms of kinds of patches, against references."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import Command
from sklearn.covariance import ledoit_wolf

import anomaly
from anomaly.config.load import parse_config
from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.scoring import arrangement as module
from anomaly.scoring.arrangement import Arrangement
from anomaly.storage.load import load_model
from anomaly.training.update import learn

_KINDS = np.eye(8, dtype=np.float32) * 4  # background and parts
_USUAL = (1, 2, 3, 0)


def embeddings(parts: Sequence[int], seed: int) -> np.ndarray[Any, Any]:
    """(1, 16, 16, 8): a part of 4×4 patches, somewhere in each quarter; 0 is background."""
    rng = np.random.default_rng(seed)
    kinds = np.zeros((16, 16), int)
    for quarter, part in enumerate(parts):
        row, column = 8 * (quarter // 2), 8 * (quarter % 2)
        y, x = rng.integers(0, 5, 2)
        kinds[row + y : row + y + 4, column + x : column + x + 4] = part
    noise = rng.normal(0, 0.1, (16, 16, 8))
    return (_KINDS[kinds] + noise).astype(np.float32)[None]


@pytest.fixture(scope="module")
def trained() -> Arrangement:
    good = Arrangement.of((((i,), embeddings(_USUAL, i), None) for i in range(40)), seed=0)
    scores = np.random.default_rng(0).uniform(1, 1.5, 40).tolist()
    return good.joined(scores, range(40), [range(i, i + 4) for i in range(0, 40, 4)])[0]


def judged(
    trained: Arrangement, parts: Sequence[int], score: float = 1.2, seed: int = 999
) -> tuple[float, str]:
    names = [f"{i}.png" for i in range(40)]
    (raised,), (text,) = trained.judged([score], embeddings(parts, seed), None, names)
    return raised, text


def test_the_covariance_is_shrunk_as_scikit_learn_shrinks_it() -> None:
    vectors = np.random.default_rng(0).normal(size=(30, 12)) @ np.diag(np.arange(1, 13))
    mean, precision = module._gaussian(vectors.astype(np.float32))
    covariance, _ = ledoit_wolf(vectors)
    np.testing.assert_allclose(np.linalg.inv(precision), covariance, rtol=1e-4, atol=1e-4)
    away = vectors[:3] - vectors.mean(0)
    expected = [np.sqrt(v @ np.linalg.inv(covariance) @ v) for v in away]
    distances = module._distances(vectors[:3].astype(np.float32), mean, precision)
    np.testing.assert_allclose(distances, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("parts", "place", "much"),
    [
        ((0, 2, 3, 0), "upper left", "little"),  # missing
        ((1, 2, 3, 1), "lower right", "much"),  # surplus
        ((1, 3, 2, 0), "upper right|lower left", "much|little"),  # swapped
    ],
)
def test_a_changed_arrangement_raises_the_score_and_says_where(
    trained: Arrangement, parts: Sequence[int], place: str, much: str
) -> None:
    raised, text = judged(trained, parts)
    assert raised > 1.5  # above every good patch score
    assert text.split(":")[0] in place.split("|")
    assert text.split(" of ")[0].split()[-1] in much.split("|")
    assert ".png shows at " in text


def test_a_good_arrangement_leaves_the_patches_score(trained: Arrangement) -> None:
    later = [judged(trained, _USUAL, seed=seed) for seed in range(100, 120)]
    assert sorted(later)[10] == (1.2, "")
    assert sum(raised > 1.5 for raised, _ in later) <= 1
    assert judged(trained, (0, 2, 3, 0), score=1e6) == (1e6, "")
    assert np.isnan(judged(trained, _USUAL, score=float("nan"))[0])


def test_the_farthest_held_out_image_scores_like_one_in_twenty() -> None:
    good = Arrangement.of((((i,), embeddings(_USUAL, i), None) for i in range(40)), seed=0)
    patches = np.linspace(1, 2, 40)
    folds = [range(i, i + 4) for i in range(0, 40, 4)]
    _, scores = good.joined(patches.tolist(), range(40), folds)
    away = [
        np.sqrt(
            (d := good.histograms[i] - np.delete(good.histograms, list(fold), 0).mean(0))
            @ np.linalg.inv(ledoit_wolf(np.delete(good.histograms, list(fold), 0))[0])
            @ d
        )
        for fold in folds
        for i in fold
    ]
    farthest = int(np.argmax(away))
    rare = np.exp(np.quantile(np.log(patches), 0.95))
    assert scores[farthest] == pytest.approx(max(rare, patches[farthest]), rel=1e-3)
    # An image of the median distance is as far below the median patch score as that is above it.
    low = np.exp(2 * np.median(np.log(patches)) - np.log(rare))
    for i in np.flatnonzero(away <= np.median(away)):
        assert patches[i] <= scores[i] <= max(patches[i], low * 1.001)


def test_tensors_score_like_arrays_and_what_does_not_count_is_not_seen(
    trained: Arrangement,
) -> None:
    shown = embeddings((0, 2, 3, 0), 5)
    score = trained.judged([1.0], shown, None, [])
    tensor = trained.judged([1.0], torch.from_numpy(shown), None, [])
    assert tensor[0] == pytest.approx(score[0], rel=1e-5)
    inside = np.ones((1, 16, 16), bool)
    inside[:, :, 12:] = False
    hidden = shown.copy()
    hidden[:, :, 12:] = 100
    assert trained.judged([1.0], shown, inside, [])[0] == pytest.approx(
        trained.judged([1.0], hidden, inside, [])[0]
    )


def test_few_images_and_missing_tensors_are_refused(trained: Arrangement) -> None:
    with pytest.raises(DataError, match="at least 20 good images"):
        Arrangement.of((((i,), embeddings(_USUAL, i), None) for i in range(19)), seed=0)
    tensors = trained.tensors()
    again = Arrangement.from_tensors(tensors)
    assert judged(again, (0, 2, 3, 0)) == judged(trained, (0, 2, 3, 0))
    with pytest.raises(ModelError, match=r"arrangement\.safetensors is damaged"):
        Arrangement.from_tensors({k: v for k, v in tensors.items() if k != "scale"})
    with pytest.raises(ConfigError, match="compares whole images"):
        parse_config({"model": {"arrangement": True}, "image": {"tile": 256}}, "test")


def _write(file: Path, seed: int, corners: Sequence[int]) -> None:
    """96 × 96 pixels: a disc in some of four corners."""
    rng = np.random.default_rng(seed)
    picture = np.full((96, 96, 3), 40.0) + rng.normal(0, 4, (96, 96, 3))
    for corner in corners:
        middle = 24 + 48 * (corner % 2), 24 + 48 * (corner // 2)
        cv2.circle(
            picture, (middle[0] + int(rng.integers(-3, 4)), middle[1]), 14, (210, 160, 90), -1
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), np.clip(picture, 0, 255).astype(np.uint8))


def test_a_model_keeps_it_and_rows_say_it(tmp_path: Path, command: Command) -> None:
    for i in range(24):
        _write(tmp_path / "good" / f"{i:02}.png", i, (0, 3))
    _write(tmp_path / "new" / "good.png", 100, (0, 3))
    _write(tmp_path / "new" / "surplus.png", 101, (0, 1, 2, 3))
    config: dict[str, Any] = {"backbone": {"name": "tiny", "weights": "random"}}
    config |= {"image": {"area": 96}, "precision": "fp32", "model": {"arrangement": True}}
    detector = anomaly.fit(tmp_path / "good", config, device="cpu", workers=1)
    plain = anomaly.fit(
        tmp_path / "good", {**config, "model": {"arrangement": False}}, device="cpu", workers=1
    )
    run, new = tmp_path / "run", tmp_path / "new"
    detector.save(run / "model")
    code, _, err = command("infer", ["--model", run, "--input", new, "--output", tmp_path / "out"])
    assert code == 0, err
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = {Path(row["path"]).stem: row for row in csv.DictReader(file)}
    assert (rows["good"]["misarranged"], rows["good"]["verdict"]) == ("", "good")
    assert rows["surplus"]["verdict"] in ("review", "reject")
    assert re.match("(upper right|lower left): too (much|little) ", rows["surplus"]["misarranged"])
    assert float(rows["surplus"]["image_score"]) > plain.predict(new / "surplus.png").score
    assert rows["surplus"]["misarranged"] in (tmp_path / "out" / "results.html").read_text()
    model = load_model(run, "cpu")
    with pytest.raises(ModelError, match="train again with all good images"):
        learn(model, [], scratch=tmp_path)
    both = zip(detector.thresholds.good.image, plain.thresholds.good.image, strict=True)  # type: ignore[union-attr]
    assert all(joined >= patches for joined, patches in both)
    arguments = ["--model", run, "--to", "onnx", "--output", tmp_path / "onnx", "--golden", new]
    code, _, err = command("export", [*arguments, "--whole"])
    assert (code != 0, "model.arrangement" in err) == (True, True)
    code, _, err = command("export", arguments)
    assert code == 0, err
    exported, own = (
        anomaly.load(folder, device="cpu").predict(new / "surplus.png")
        for folder in (tmp_path / "onnx", run)
    )
    assert exported.score == pytest.approx(own.score, rel=1e-4)
    assert exported.misarranged == own.misarranged != ""
