"""The generated data set: its layout, its determinism, its masks, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from anomaly.errors import ConfigError, OutputError
from anomaly.sample_data import DEFECT_TYPES, PRODUCTS, write_sample_data
from anomaly.sample_data import camera as noise
from anomaly.sample_data import products as writer
from anomaly.sample_data.camera import Camera, scene_side, visible_change
from anomaly.sample_data.products import CATALOGUE, Shot

SIZE = 128
EVERY_DEFECT = [(product, kind) for product in PRODUCTS for kind in DEFECT_TYPES[product]]


def small_set(root: Path, workers: int = 2) -> Path:
    write_sample_data(root, size=SIZE, n_train=2, n_good=1, n_defect=11, workers=workers)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def pictures(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(root).items() if name.endswith(".png")}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_set(tmp_path_factory.mktemp("sample"))


def test_offers_what_it_promises() -> None:
    assert set(PRODUCTS) == {"brushed_plate", "woven_fabric"}
    assert all(len(DEFECT_TYPES[product]) >= 4 for product in PRODUCTS)
    assert all("good" not in DEFECT_TYPES[product] for product in PRODUCTS)


def test_has_the_layout_of_mvtec_ad(sample: Path) -> None:
    names = set(contents(sample))
    expected = set()
    for product in PRODUCTS:
        good = ["train/good/000", "train/good/001", "test/good/000"]
        expected |= {f"{product}/readme.txt", *(f"{product}/{name}.png" for name in good)}
        for number, kind in enumerate(DEFECT_TYPES[product]):
            # Eleven images dealt out to five types: the first type gets the odd one.
            for index in range(3 if number == 0 else 2):
                expected.add(f"{product}/test/{kind}/{index:03d}.png")
                expected.add(f"{product}/ground_truth/{kind}/{index:03d}_mask.png")
    assert names == expected
    assert sorted(p.name for p in sample.iterdir()) == sorted(PRODUCTS)


def test_says_that_it_is_generated(sample: Path) -> None:
    for product in PRODUCTS:
        text = (sample / product / "readme.txt").read_text(encoding="utf-8")
        assert product in text
        assert "generated" in text
        assert "CC0" in text
        assert "128 x 128" in text


def test_images_are_colour_photographs_in_range(sample: Path) -> None:
    for name in pictures(sample):
        if "ground_truth" in name:
            continue
        image = cv2.imread(str(sample / name), cv2.IMREAD_UNCHANGED)
        assert image is not None
        assert image.shape == (SIZE, SIZE, 3)
        assert image.std() > 20
        # Neither under- nor overexposed.
        assert (image == 0).mean() < 0.01
        assert (image == 255).mean() < 0.02


def test_masks_are_binary_and_small(sample: Path) -> None:
    masks = [name for name in pictures(sample) if "ground_truth" in name]
    assert len(masks) == 22
    for name in masks:
        mask = cv2.imread(str(sample / name), cv2.IMREAD_UNCHANGED)
        assert mask is not None
        assert mask.shape == (SIZE, SIZE)
        assert set(np.unique(mask)) == {0, 255}
        assert 0.0002 < (mask > 0).mean() < 0.2


def test_no_two_good_parts_are_alike(sample: Path) -> None:
    good = [data for name, data in pictures(sample).items() if "/good/" in name]
    assert len(set(good)) == len(good) == 6


def test_the_bytes_are_the_same_whatever_the_workers(sample: Path, tmp_path: Path) -> None:
    assert contents(small_set(tmp_path, workers=1)) == contents(sample)


def test_a_smaller_set_is_part_of_a_larger_one(sample: Path, tmp_path: Path) -> None:
    write_sample_data(tmp_path, size=SIZE, products=PRODUCTS[1:], n_train=1, n_good=0, n_defect=3)
    part, whole = pictures(tmp_path), pictures(sample)
    assert len(part) == 1 + 3 + 3
    assert part.items() <= whole.items()


def test_severity_spreads_from_obvious_to_subtle() -> None:
    values = [Shot("brushed_plate", "test", "dent", index).severity for index in range(66)]
    assert values[:9] == [1, 0, 1 / 2, 3 / 4, 1 / 4, 7 / 8, 3 / 8, 5 / 8, 1 / 8]
    # The first 2 + (2^k - 1) indices are an even grid.
    assert sorted(values[:65]) == [i / 64 for i in range(65)]


Twins = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]


def twins(product: str, kind: str, severity: float, seed: int, size: int = SIZE) -> Twins:
    """One part photographed twice with the same noise: good, with its defect; and the mask."""
    made = CATALOGUE[product]
    scene = made.draw(np.random.default_rng([seed, 0]), scene_side(size))
    faulty = made.defects[kind](scene, severity, np.random.default_rng([seed, 1]))
    camera = Camera.set_up(np.random.default_rng([seed, 2]), size)
    before, after = (camera.expose(made.shade(part)) for part in (scene, faulty))
    good, bad = (camera.develop(x, np.random.default_rng([seed, 3])) for x in (before, after))
    return good, bad, visible_change(before, after)


@pytest.mark.parametrize(("product", "kind"), EVERY_DEFECT)
def test_mask_covers_the_change_and_nothing_else(product: str, kind: str) -> None:
    for seed, severity in enumerate((1.0, 0.5, 0.0)):
        good, bad, mask = twins(product, kind, severity, seed, size=384)
        change = np.abs(good.astype(int) - bad.astype(int)).max(axis=2)
        near = cv2.dilate(mask, np.ones((5, 5), np.uint8)) > 0
        assert change[mask > 0].max() >= 8, "the defect can be seen"
        assert change[~near].max() <= 0.35 * change.max(), "outside the mask it can't"
        assert change[~near].sum() <= 0.15 * change.sum()
        # Tight: no part of the mask is far from a change.
        changed = np.asarray(change > 2, np.uint8)
        reach = cv2.dilate(changed, np.ones((9, 9), np.uint8)) > 0
        assert reach[mask > 0].mean() > 0.95


@pytest.mark.parametrize(("product", "kind"), EVERY_DEFECT)
def test_an_obvious_defect_changes_more_than_a_subtle_one(product: str, kind: str) -> None:
    def change(severity: float) -> float:
        pairs = [twins(product, kind, severity, seed)[:2] for seed in range(4)]
        return float(np.mean([np.abs(a.astype(int) - b.astype(int)).mean() for a, b in pairs]))

    assert change(1.0) > 1.5 * change(0.0) > 0


def arrays(part: object) -> Iterator[NDArray[np.generic]]:
    if isinstance(part, np.ndarray):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from arrays(getattr(part, field.name))


@pytest.mark.parametrize("product", PRODUCTS)
def test_scenes_stay_in_single_precision(product: str) -> None:
    # One float64 factor would double the time of everything behind it, unnoticed.
    made = CATALOGUE[product]
    good = made.draw(np.random.default_rng(0), 280)
    parts = [good] + [d(good, 0.5, np.random.default_rng(1)) for d in made.defects.values()]
    for part in parts:
        assert {a.dtype for a in arrays(part)} <= {np.dtype(np.float32), np.dtype(np.uint8)}
        assert made.shade(part).dtype == np.float32


@given(seed=st.integers(0, 2**32), side=st.integers(200, 300), octaves=st.integers(1, 3))
def test_noise_has_the_promised_size_and_strength(seed: int, side: int, octaves: int) -> None:
    rng = np.random.default_rng(seed)
    cloud = noise.clouds(rng, side, 12, octaves)
    streak = noise.streaks(rng, side, side // 4)
    for field in (cloud, streak, noise.white(rng, (side, side))):
        assert field.shape == (side, side)
        assert field.dtype == np.float32
        assert abs(field.mean()) < 0.5
        assert 0.6 < field.std() < 1.4


def test_existing_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / PRODUCTS[1] / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(OutputError, match=PRODUCTS[1]):
        write_sample_data(tmp_path, size=SIZE)
    # Refused before any work: the first product hasn't been made either.
    assert contents(tmp_path) == {f"{PRODUCTS[1]}/mine.txt": b"mine"}


def test_overwriting_replaces_the_product_whole(tmp_path: Path) -> None:
    old = tmp_path / PRODUCTS[0] / "old.png"
    old.parent.mkdir()
    old.write_text("old")
    write_sample_data(
        tmp_path,
        size=SIZE,
        products=PRODUCTS[:1],
        n_train=1,
        n_good=0,
        n_defect=0,
        overwrite=True,
    )
    assert set(contents(tmp_path)) == {
        f"{PRODUCTS[0]}/readme.txt",
        f"{PRODUCTS[0]}/train/good/000.png",
    }


def test_a_full_disk_leaves_the_old_set_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / PRODUCTS[0] / "old.png"
    old.parent.mkdir()
    old.write_text("old")
    write = writer._write_png

    def fill_up(path: Path, pixels: NDArray[np.uint8]) -> None:
        if path.stem == "001":
            raise OSError(28, "No space left on device")
        write(path, pixels)

    monkeypatch.setattr(writer, "_write_png", fill_up)
    with pytest.raises(OutputError, match="No space left"):
        write_sample_data(tmp_path, size=SIZE, n_train=3, n_good=1, n_defect=1, overwrite=True)
    assert contents(tmp_path) == {f"{PRODUCTS[0]}/old.png": b"old"}
    assert [p.name for p in tmp_path.iterdir()] == [PRODUCTS[0]]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(OutputError, match="root"):
        write_sample_data(tmp_path / "root", size=SIZE)
    (tmp_path / PRODUCTS[0]).write_text("")
    with pytest.raises(OutputError, match=PRODUCTS[0]):
        write_sample_data(tmp_path, size=SIZE, overwrite=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"products": ["brushed_plates"]}, "did you mean 'brushed_plate'"),
        ({"size": 64}, "size is 64"),
        ({"n_good": -2}, "-2"),
    ],
)
def test_impossible_orders_are_refused(
    wrong: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_sample_data(tmp_path / "root", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "root").exists()


def test_progress_counts_every_image(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_sample_data(
        tmp_path,
        size=SIZE,
        n_train=2,
        n_good=1,
        n_defect=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(i, 8) for i in range(1, 9)]


def test_needs_no_torch() -> None:
    code = "import sys, anomaly.sample_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_default_set_is_complete(tmp_path: Path) -> None:
    write_sample_data(tmp_path)
    for product in PRODUCTS:
        folder = tmp_path / product
        assert len(list(folder.glob("train/good/*.png"))) == 40
        assert len(list(folder.glob("test/good/*.png"))) == 20
        assert len(list(folder.glob("test/*/*.png"))) == 50
        masks = list(folder.glob("ground_truth/*/*.png"))
        assert len(masks) == 30
        for path in masks:
            mask = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            assert mask is not None
            assert mask.shape == (384, 384)
            assert 0.0003 < (mask > 0).mean() < 0.15, path
