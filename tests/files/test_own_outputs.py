"""What this program has written is never taken for input; what others have written always is."""

import shutil
from pathlib import Path

import pytest
from conftest import Command, write_part

from anomaly.datasets import open_dataset
from anomaly.datasets.inputs import find_inputs
from anomaly.imaging.listing import list_files


def test_a_run_in_the_folder_that_it_learned_from(
    tmp_path: Path, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = tmp_path / "small"
    shutil.copytree(run_folder, small)
    assert list((small / "suspects").glob("*.png"))
    shutil.copytree(run_folder, small / "older")
    shutil.copytree(run_folder / "model", small / "a model")
    (small / "a model" / "region.png").write_bytes(b"")
    for name in ("a.png", "older/b.png"):
        write_part(small / name, seed=1)
    dataset = open_dataset("folder", small, None)
    assert [sample.name for sample in dataset.train] == ["a.png", "older/b.png"]
    (line,) = caplog.messages
    assert line == (
        f"{small}: skipped this program's own outputs: a model, model, older/model, "
        "older/suspects, suspects"
    )
    # Named outright, they are meant.
    assert len(find_inputs([small / "suspects"]).paths) > 1


def test_heatmaps_are_not_scored(
    run_folder: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    line = tmp_path / "line"
    write_part(line / "a.png", seed=1)
    base = ["--model", run_folder, "--input"]
    assert command("infer", [*base, line, "--output", line / "out"])[0] == 0
    assert command("infer", [*base, line / "a.png", "--output", line, "--masks"])[0] == 0
    (tmp_path / "link").symlink_to(line)
    explained = ["--model", run_folder, "--input", line / "a.png", "--output", line / "why"]
    assert command("explain", explained)[0] == 0
    caplog.clear()
    code, out, _ = command("infer", [*base, tmp_path / "link", "--output", tmp_path / "out"])
    assert (code, "1 of 1 images scored" in out) == (0, True)
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'link'}: skipped this program's own outputs: heatmap")


def test_test_images_beside_results(tmp_path: Path) -> None:
    for name in ("train/good/a.png", "test/good/b.png", "test/crack/c.png", "test/heatmaps/d.png"):
        write_part(tmp_path / name, seed=1)
    kinds = [sample.defect_type for sample in open_dataset("mvtec", tmp_path, None).test]
    assert kinds == ["crack", "good", "heatmaps"]
    (tmp_path / "test" / "results.watched.jsonl").touch()
    kinds = [sample.defect_type for sample in open_dataset("mvtec", tmp_path, None).test]
    assert kinds == ["crack", "good"]


@pytest.mark.parametrize(
    "foreign",
    [
        {"results.csv": b"path,score\n", "heatmaps/a.png": b"", "masks/b.png": b""},
        {"model/a.png": b"", "suspects/b.png": b"", "model/manifest.json": b'{"format": "car/1"}'},
        {"train.json": b"{}", "model/a.png": b""},
        {"explanation.json": b'{"pictures": 3}', "grad_cam.png": b""},
    ],
)
def test_what_others_have_written_is_kept(foreign: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in foreign.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert {f.relative_to(tmp_path).as_posix() for f in list_files(tmp_path)} == set(foreign)
