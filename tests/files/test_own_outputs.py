"""What this program has written is never taken for input; what others have written always is."""

import shutil
from pathlib import Path

import pytest
from kit import touch

from anomaly.datasets.inputs import find_inputs
from anomaly.datasets.layouts import open_dataset
from anomaly.files.writing import write
from anomaly.imaging.read import list_files


def test_a_folder_of_images_with_everything_that_was_made_of_them(
    run_folder: Path,
    inferred: Path,
    explained: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    small = tmp_path / "small"
    shutil.copytree(run_folder, small)
    assert list((small / "suspects").glob("*.png"))
    shutil.copytree(run_folder, small / "view 1")
    shutil.copytree(run_folder / "model", small / "a model")
    touch(small, "a model/region.png", "a.png", "view 1/b.png", "view 2/c.png")
    shutil.copytree(inferred, small / "view 2", dirs_exist_ok=True)
    shutil.copytree(explained, small / "why")
    (tmp_path / "link").symlink_to(small)
    for place in (small, tmp_path / "link"):
        caplog.clear()
        dataset = open_dataset("folder", place)
        names = [sample.name for sample in dataset.train]
        assert names == ["a.png", "view 1/b.png", "view 2/c.png"]
        (line,) = caplog.messages
        assert line.startswith(f"{place}: skipped this program's own outputs: a model, model, ")
    # Named outright, they are meant.
    assert len(find_inputs([small / "suspects"]).paths) > 1


def test_test_images_beside_results(tmp_path: Path) -> None:
    names = ("train/good/a.png", "test/good/b.png", "test/crack/c.png", "test/heatmaps/d.png")
    touch(tmp_path, *names)
    kinds = [sample.defect_type for sample in open_dataset("mvtec", tmp_path).test]
    assert kinds == ["crack", "good", "heatmaps"]
    (tmp_path / "test" / "results.watched.jsonl").touch()
    kinds = [sample.defect_type for sample in open_dataset("mvtec", tmp_path).test]
    assert kinds == ["crack", "good"]


OTHERS = [
    {"results.csv": "path,score\n", "heatmaps/a.png": "", "masks/b.png": ""},
    {"model/a.png": "", "suspects/b.png": "", "model/manifest.json": '{"format": "car/1"}'},
    {"train.json": "{}", "model/a.png": ""},
    {"explanation.json": '{"pictures": 3}', "grad_cam.png": ""},
]


def test_what_others_have_written_is_kept(tmp_path: Path) -> None:
    for number, files in enumerate(OTHERS):
        root = tmp_path / str(number)
        for name, text in files.items():
            write(root / name, text)
        assert {f.relative_to(root).as_posix() for f in list_files(root)} == set(files)
