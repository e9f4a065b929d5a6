"""`anomaly demo`: its steps, and the generated data set: layout, determinism, masks, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from kit import contents
from numpy.typing import NDArray

from anomaly import cli
from anomaly.cli import main, start
from anomaly.datasets.layouts import open_dataset
from anomaly.desk import demo
from anomaly.desk.demo import DEFECTS, write_sample_data
from anomaly.errors import OutputError


def test_each_step_is_a_command_and_a_failing_one_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps: list[Sequence[str]] = []
    codes = iter([0] * 3 + [3])

    def execute(arguments: Sequence[str]) -> int:
        cli._parser(arguments[0]).parse_args(arguments[1:])  # exits where it can't
        steps.append(arguments)
        return next(codes)

    made: list[Path] = []
    monkeypatch.setattr(start, "write_sample_data", lambda root, **more: made.append(root))
    monkeypatch.setattr(start, "execute", execute)
    assert main(["demo", "--output", "all"]) == 0
    assert [step[0] for step in steps] == ["train", "infer", "evaluate"]
    assert all("--overwrite" in step for step in steps)
    report = tmp_path / "all" / "evaluation" / "sample_brushed_plate" / "report.html"
    assert str(report) in capsys.readouterr().out
    assert main(["demo"]) == 3  # its training couldn't use some images
    assert [step[0] for step in steps[3:]] == ["train"]
    assert made == [Path("data/sample/brushed_plate")] * 2
    assert "Look at" not in capsys.readouterr().out


SIZE = 128
FEW = {"size": SIZE, "n_train": 2, "n_good": 1, "n_defect": 6}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    write_sample_data(folder, **FEW)  # type: ignore[arg-type]
    return folder


def test_has_the_layout_of_mvtec_ad(sample: Path) -> None:
    # Six images dealt out to five types: the first type gets the odd one.
    defects = {f"{kind}/000" for kind in DEFECTS} | {"scratch/001"}
    good = {f"{name}.png" for name in ("train/good/000", "train/good/001", "test/good/000")}
    masks = {f"ground_truth/{name}_mask.png" for name in defects}
    files = contents(sample)
    assert files.keys() == {"readme.txt"} | good | masks | {f"test/{n}.png" for n in defects}
    assert all(word in files["readme.txt"] for word in (b"generated", b"CC0", b"128 x 128"))
    assert len({files[name] for name in good}) == 3  # no two are alike
    opened = open_dataset("mvtec", sample)
    assert {image.defect_type for image in opened.test} == {"good", *DEFECTS}


def test_a_smaller_set_is_part_of_a_larger_one(sample: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = tmp_path / "part"
    write_sample_data(
        folder, size=SIZE, n_train=1, n_good=0, n_defect=3, progress=lambda *n: seen.append(n)
    )
    (folder / "readme.txt").unlink()
    part = contents(folder)
    assert len(part) == 1 + 3 + 3
    assert part.items() <= contents(sample).items()
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_severity_spreads_from_obvious_to_subtle() -> None:
    values = [demo.severity_of(index) for index in range(65)]
    assert values[:9] == [1, 0, 1 / 2, 3 / 4, 1 / 4, 7 / 8, 3 / 8, 5 / 8, 1 / 8]
    # The first 2 + (2^k - 1) indices are an even grid.
    assert sorted(values) == [i / 64 for i in range(65)]


@pytest.mark.parametrize("kind", DEFECTS)
def test_mask_covers_the_change_and_nothing_else(kind: str) -> None:
    changes = []
    for seed, severity in enumerate((1.0, 0.5, 0.0)):
        # One part photographed twice with the same noise: good, and with its defect.
        part = demo.good_plate(np.random.default_rng([seed, 0]), demo.scene_side(384))
        faulty = DEFECTS[kind](part, severity, np.random.default_rng([seed, 1]))
        shot = demo.Camera.set_up(np.random.default_rng([seed, 2]), 384)
        lights = [shot.expose(demo.shade(one)) for one in (part, faulty)]
        good, bad = (shot.develop(x, np.random.default_rng([seed, 3])).astype(int) for x in lights)
        change, mask = np.abs(good - bad).max(axis=2), demo.visible_change(*lights)
        near = cv2.dilate(mask, np.ones((5, 5), np.uint8)) > 0
        assert change[mask > 0].max() >= 8, "the defect can be seen"
        assert change[~near].max() <= 0.35 * change.max(), "outside the mask it can't"
        assert change[~near].sum() <= 0.15 * change.sum()
        # Tight: no part of the mask is far from a change.
        reach = cv2.dilate((change > 2).astype(np.uint8), np.ones((9, 9), np.uint8)) > 0
        assert reach[mask > 0].mean() > 0.95
        changes.append(change.mean())
    assert changes[0] > 1.5 * changes[2]


def test_what_is_there_is_replaced_only_on_request_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = tmp_path / "plates", demo._write_png
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")

    def fill_up(path: Path, pixels: NDArray[np.uint8]) -> None:
        if path.stem == "001":
            raise OSError(28, "No space left on device")
        write(path, pixels)

    with pytest.raises(OutputError, match=r"plates exists.*overwrite=True"):
        write_sample_data(folder, **FEW)  # type: ignore[arg-type]
    monkeypatch.setattr(demo, "_write_png", fill_up)
    with pytest.raises(OutputError, match="No space left"):
        write_sample_data(folder, **FEW, overwrite=True)  # type: ignore[arg-type]
    assert contents(tmp_path) == {"plates/mine.txt": b"mine"}
    write_sample_data(folder, size=SIZE, n_train=1, n_good=0, n_defect=0, overwrite=True)
    assert contents(tmp_path).keys() == {"plates/readme.txt", "plates/train/good/000.png"}
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file exists"):
        write_sample_data(tmp_path / "file", overwrite=True)
    assert contents(tmp_path)["file"] == b""
