"""Saved features come back as they were, whatever happened between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.errors import DataError, OutputError
from anomaly.export import feature_files
from anomaly.export.feature_files import FeatureWriter, read_features

SETTINGS: dict[str, Any] = {"layers": ["layer1", "layer2.0"], "format": "safetensors", "x": (1, 2)}


def features(i: int, size: int = 1) -> dict[str, np.ndarray]:
    values = np.random.default_rng(i).normal(size=(5, size)).astype(np.float32)
    return {"layer1": values[:2, 0], "layer2.0": values[2:]}


def add(writer: FeatureWriter, images: range, size: int = 1) -> None:
    for i in images:
        writer.add(f"{i}.png", f"sha{i}", features(i, size))


def check(folder: Path, images: range) -> None:
    saved = read_features(folder)
    assert sorted(saved.paths) == sorted(f"{i}.png" for i in images)
    for row, path in enumerate(saved.paths):
        for layer, value in features(int(path.removesuffix(".png"))).items():
            np.testing.assert_array_equal(saved.values[layer][row], value)


@pytest.mark.parametrize("form", ["safetensors", "npy"])
def test_what_is_saved_is_read(form: str, tmp_path: Path) -> None:
    with FeatureWriter(tmp_path, {**SETTINGS, "format": form}, 4, overwrite=False) as writer:
        add(writer, range(10))
    check(tmp_path, range(10))
    shards = {file.name.partition(".")[0] for file in tmp_path.glob("features-*")}
    assert shards == {"features-00000", "features-00001", "features-00002"}
    index = (tmp_path / "index.csv").read_text().splitlines()
    assert index[0] == "shard,row,path,image_sha256"
    assert index[5] == "features-00001,0,4.png,sha4"


@settings(deadline=None, max_examples=60)
@given(
    shard_size=st.integers(1, 5),
    deaths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 80)), max_size=3),
    form=st.sampled_from(["safetensors", "npy"]),
)
def test_a_run_that_is_cut_off_anywhere_goes_on(
    shard_size: int, deaths: list[tuple[int, int]], form: str, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("features")
    values = {**SETTINGS, "format": form}
    for after, lost in deaths:
        writer = FeatureWriter(folder, values, shard_size, overwrite=False)
        done = writer.done
        todo = [i for i in range(10) if f"{i}.png" not in done]
        for i in todo[:after]:
            writer.add(f"{i}.png", f"sha{i}", features(i))
        # Neither what waits in memory nor the end of the index reaches the disk.
        index = folder / "index.csv"
        index.write_bytes(index.read_bytes()[: max(36, index.stat().st_size - lost)])
    with FeatureWriter(folder, values, shard_size, overwrite=False) as writer:
        done = writer.done
        for i in range(10):
            if f"{i}.png" in done:
                assert done[f"{i}.png"] == f"sha{i}"
            else:
                writer.add(f"{i}.png", f"sha{i}", features(i))
    check(folder, range(10))


def test_an_exception_keeps_what_is_there_and_a_shard_that_vanished_is_made_anew(
    tmp_path: Path,
) -> None:
    writer = FeatureWriter(tmp_path, SETTINGS, 2, overwrite=False)
    add(writer, range(5))
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt
    check(tmp_path, range(5))
    (tmp_path / "features-00000.safetensors").unlink()
    with pytest.raises(DataError, match="features-00000 can't be read"):
        read_features(tmp_path)
    with FeatureWriter(tmp_path, SETTINGS, 2, overwrite=False) as writer:
        assert sorted(writer.done) == ["2.png", "3.png", "4.png"]
        add(writer, range(2))
    check(tmp_path, range(5))


def test_other_settings_are_refused_and_overwriting_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with FeatureWriter(tmp_path, SETTINGS, 2, overwrite=False) as writer:
        add(writer, range(3))
    other = {**SETTINGS, "x": 3}
    with pytest.raises(OutputError, match=r"settings \(x is \[1, 2\] there and 3 here.*overwrite"):
        FeatureWriter(tmp_path, other, 2, overwrite=False)
    check(tmp_path, range(3))
    with FeatureWriter(tmp_path, other, 2, overwrite=True) as writer:
        assert not writer.done
        add(writer, range(4, 5))
    check(tmp_path, range(4, 5))
    assert json.loads((tmp_path / "features.json").read_text())["x"] == 3
    assert (tmp_path / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_only_looks_like_features_is_somebodys_own(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "index.csv").write_text("mine")
    with pytest.raises(OutputError, match=r"index\.csv isn't from saved features"):
        FeatureWriter(tmp_path, SETTINGS, 2, overwrite=overwrite)
    assert (tmp_path / "index.csv").read_text() == "mine"
    (tmp_path / "index.csv").unlink()
    (tmp_path / "features-mean.npy").write_text("mine")
    for again in (False, overwrite):
        with FeatureWriter(tmp_path, SETTINGS, 2, overwrite=again) as writer:
            add(writer, range(0 if writer.done else 3))
    check(tmp_path, range(3))
    assert (tmp_path / "features-mean.npy").read_text() == "mine"


@pytest.mark.parametrize("form", ["safetensors", "npy"])
def test_maps_that_lie_channels_last_are_read_as_they_are(form: str, tmp_path: Path) -> None:
    maps = np.arange(24, dtype=np.float32).reshape(2, 3, 4)  # h, w, C
    with FeatureWriter(tmp_path, {"layers": ["a"], "format": form}, 2, overwrite=False) as writer:
        for i in range(2):
            writer.add(f"{i}.png", "", {"a": (maps + i).transpose(2, 0, 1)})
    expected = np.stack([maps, maps + 1]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(read_features(tmp_path).values["a"], expected)


def test_images_of_several_shapes_lie_in_shards_of_their_own(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path, SETTINGS, 8, overwrite=False) as writer:
        for i in range(6):
            writer.add(f"{i}.png", "", features(i, size=1 + i % 2))
    with pytest.raises(DataError, match="several sizes"):
        read_features(tmp_path)
    assert len(list(tmp_path.glob("features-*"))) == 2


def test_a_shard_closes_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_files, "_SHARD_BYTES", 2 * 5 * 4)
    with FeatureWriter(tmp_path, SETTINGS, 100, overwrite=False) as writer:
        add(writer, range(2))
        assert len(writer.done) == 2
        add(writer, range(2, 3))
        assert len(writer.done) == 2


def test_folders_without_features_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no features"):
        read_features(tmp_path)
    (tmp_path / "features.json").write_text("[]")
    with pytest.raises(DataError, match="isn't a file that `anomaly features` wrote"):
        read_features(tmp_path)
    (tmp_path / "features.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(DataError, match="no features yet"):
        read_features(tmp_path)
    (tmp_path / "index.csv").write_text("shard,row,path\nbroken\n")
    with pytest.raises(DataError, match="isn't an index"):
        read_features(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "npy"])
def test_an_index_with_more_rows_than_its_shard_is_told(form: str, tmp_path: Path) -> None:
    with FeatureWriter(tmp_path, SETTINGS | {"format": form}, 2, overwrite=False) as writer:
        add(writer, range(2))
    with (tmp_path / "index.csv").open("a") as file:
        file.write("features-00000,2,2.png,sha2\n")
    with pytest.raises(DataError, match="shard features-00000 can't be read"):
        read_features(tmp_path)


def test_images_of_many_shapes_wait_within_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_files, "_SHARD_BYTES", 4000)
    most = 0
    with FeatureWriter(tmp_path, SETTINGS, 100, overwrite=False) as writer:
        for i in range(40):
            writer.add(f"{i}.png", "", {"layer1": np.zeros(100 + i), "layer2.0": np.zeros(3)})
            most = max(most, i + 1 - len(writer.done))
    assert most <= 4000 // (8 * 103)
    assert len(writer.done) == 40
