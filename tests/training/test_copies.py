"""Copies among the training images: one picture in several files; turned copies."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import with_note, write_part
from kit import rgb, tiny

import anomaly
from anomaly.explain.evidence import GoodImages
from anomaly.imaging.loading import NetworkInput, turn_of, turned
from anomaly.imaging.pool import Decoders


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_files_of_the_same_pixels_are_copies(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were held out one by one, and scored by models that had learned the same picture."""
    for i in range(6):
        write_part(tmp_path / f"{i:03}.png", seed=i)
    settings = tiny(model={"kind": kind, "dimensions": 20, "coreset_ratio": 1.0})
    expected = anomaly.fit(tmp_path, settings, device="cpu").thresholds
    assert "are copies" not in caplog.text
    for number, source in enumerate(sorted(tmp_path.iterdir())):
        with_note(source, tmp_path / f"z{source.name}", number)
    shutil.copy(tmp_path / "000.png", tmp_path / "zz.png")
    found = anomaly.fit(tmp_path, settings, device="cpu").thresholds
    said = "7 of 13 training images are copies of others, which leaves 6 different images"
    assert said in caplog.text
    assert found is not None
    assert expected is not None
    assert found.good.names == expected.good.names
    assert found.image == pytest.approx(expected.image, rel=0.1)


def test_turned_and_mirrored_pictures_are_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    noise = np.random.default_rng(0).integers(160, 240, (64, 96, 3), np.uint8)
    part = cv2.blur(noise, (5, 5))
    parts = [part, part[::-1], part[:, ::-1], part[::-1, ::-1]]
    with caplog.at_level(logging.WARNING, "anomaly"):
        anomaly.fit([rgb(one) for one in parts], tiny(), device="cpu")
    assert "are copies" not in caplog.text


SHAPE = (64, 96)


def _parts(count: int) -> list[np.ndarray]:
    """Dark pictures with a bright corner, each a little different."""
    parts = []
    for i in range(count):
        rng = np.random.default_rng(i)
        part = rng.integers(20, 30, (*SHAPE, 3), dtype=np.uint8)
        part[: SHAPE[0] // 2, : SHAPE[1] // 3] += np.uint8(150)
        parts.append(part)
    return parts


def _settings(copies: str, **model: object) -> dict[str, Any]:
    return tiny(model={"turned_copies": copies, "coreset_ratio": 1.0} | model)


@cache
def _trained(copies: str) -> anomaly.Detector:
    return anomaly.fit([*map(rgb, _parts(6))], _settings(copies), device="cpu")


@pytest.mark.parametrize(
    ("copies", "known"),
    [("none", [0]), ("quarter_turns", range(4)), ("quarter_turns_and_mirrors", range(8))],
)
def test_a_turned_part_is_as_good(copies: str, known: Sequence[int]) -> None:
    detector = _trained(copies)
    part = _parts(1)[0]
    parts = [np.ascontiguousarray(turned(part, turn)) for turn in range(8)]
    scores = [found.score for found in detector.predict([*map(rgb, parts)])]
    assert all(scores[turn] <= scores[0] * 1.2 + 1e-2 for turn in known)
    if copies == "none":
        assert max(scores) > 2 * scores[0] + 1e-2
    # Each vector has an origin of its own.
    origins = detector.model.scorer.tensors()["origins"]
    assert len(torch.unique(origins, dim=0)) == len(origins)
    assert {turn_of(row)[0] for row in origins[:, 1].tolist()} == {*known}


def test_copies_belong_to_their_image() -> None:
    """Each image is scored once, by a bank without its copies."""
    # How far bank vectors lie apart, which copies change, is left out of the scores here.
    plain, more = (
        anomaly.fit([*map(rgb, _parts(6))], _settings(copies, spacing_neighbours=0), device="cpu")
        for copies in ("none", "quarter_turns")
    )
    assert plain.thresholds is not None
    assert more.thresholds is not None
    assert len(more.thresholds.good.image) == 6
    assert len(more.manifest["training_images"]) == 6
    # Other images' copies can only bring a bank nearer, and an own copy would bring scores to 0.
    for mine, theirs in zip(more.thresholds.good.image, plain.thresholds.good.image, strict=True):
        assert 0.3 * theirs < mine <= theirs * 1.001
    vectors = plain.model.scorer.tensors()["vectors"]
    assert len(more.model.scorer.tensors()["vectors"]) == 4 * len(vectors)


def test_copies_of_images_that_are_learned_later() -> None:
    """The second half's copies are known as the first's are, and belong to its images."""
    marked = [part.copy() for part in _parts(12)[6:]]
    for part in marked:
        part[40:52, 60:76] += np.uint8(90)
    first = _trained("quarter_turns")
    detector = first.update([*map(rgb, marked)])
    parts = [np.ascontiguousarray(turned(marked[0], turn)) for turn in range(4)]
    scores = [found.score for found in detector.predict([*map(rgb, parts)])]
    assert max(scores[1:]) <= scores[0] * 1.2 + 1e-2
    assert first.predict(rgb(marked[0])).score > 2 * scores[0] + 1e-2
    origins = detector.model.scorer.tensors()["origins"].tolist()
    assert {(image, turn_of(row)[0]) for image, row, _ in origins} >= {(6, t) for t in range(4)}


def test_a_region_is_turned_with_its_image() -> None:
    """What is ignored isn't learned from the copies either."""
    half = {"polygons": [[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]]}
    config = _settings("quarter_turns") | {"image": {"area": 64, "ignore": half}}
    detector = anomaly.fit([*map(rgb, _parts(6))], config, device="cpu")
    kept, whole = (
        len(each.model.scorer.tensors()["vectors"])
        for each in (detector, _trained("quarter_turns"))
    )
    assert kept * 2 == whole


def test_evidence_is_shown_where_it_was_photographed(tmp_path: Path) -> None:
    for i, part in enumerate(_parts(4)):
        cv2.imwrite(str(tmp_path / f"{i}.png"), part[..., ::-1])
    detector = anomaly.fit(tmp_path, _settings("quarter_turns"), device="cpu")
    decoders = Decoders(detector.model.loading, keep_image=True)
    good = GoodImages(detector.model, tmp_path)
    item = decoders.load(tmp_path / "2.png")
    assert isinstance(item, NetworkInput)
    for turn in (1, 2):
        seen = replace(item, pixels=np.ascontiguousarray(turned(item.pixels, turn)))
        embeddings = detector.model.embedder([seen])[0]
        height, width = embeddings.shape[:2]
        upright = (width, height) if turn % 2 else (height, width)
        places = turned(np.arange(height * width).reshape(upright), turn)
        _, origins = detector.model.scorer.evidence(embeddings.flatten(0, 1), 1)
        for (image, row, column), place in zip(
            origins[:, 0].tolist(), places.flatten().tolist(), strict=True
        ):
            assert image == 2
            assert good.as_photographed(image, row, column) == divmod(place, upright[1])
