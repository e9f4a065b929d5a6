"""What is wrong with a command line is told before torch is imported, which takes seconds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PYTHONPATH, write_part

from anomaly.storage.folder import EXPORT, MANIFEST

_RUN = """
import sys
from anomaly.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("torch" if "torch" in sys.modules else "light", code or 0)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a good image, that image, and what is a model folder at first sight."""
    root = tmp_path_factory.mktemp("places")
    write_part(root / "good" / "part.png", seed=0)
    for name, files in (("model", [MANIFEST]), ("export", [MANIFEST, EXPORT])):
        (root / name).mkdir()
        for file in files:
            (root / name / file).write_text("{}")
    return {
        "good": root / "good",
        "part": root / "good" / "part.png",
        "model": root / "model",
        "export": root / "export",
    }


def _check(arguments: str, code: int, message: str, folder: Path) -> None:
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments.split()],
        cwd=folder,
        env={"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert message in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"light {code}"
    assert {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("infer --model nowhere --input . --output o", 2, "no model at nowhere"),
        ("infer --watch --model nowhere --input . --output o", 2, "no model at nowhere"),
        ("calibrate --model nowhere", 2, "no model at nowhere"),
        ("evaluate --model nowhere --output o", 2, "no model at nowhere"),
        ("evaluate --config nowhere --output o", 2, "no config nowhere"),
        ("explain --model nowhere --input . --output o", 2, "no model at nowhere"),
        ("features --model nowhere --input . --output o.npz", 2, "no model at nowhere"),
        ("layers --model nowhere", 2, "no model at nowhere"),
        ("selfcheck --model nowhere --golden .", 2, "no model at nowhere"),
        ("train --config folder --set mode.kind=padim", 2, "unknown key 'mode'"),
        ("check --config nowhere", 2, "no config nowhere"),
        ("train --help", 0, "usage:"),
        ("serve --models nowhere", 2, "no model at nowhere"),
        ("features --backbone resnet18 --input nowhere --output o.npz", 2, "nowhere doesn't exist"),
        ("features --backbone resnet18 --weights n.pth --input . --output o.npz", 2, "n.pth"),
        ("explain --backbone resnet18 --weights n.pth --input {part} --output o", 2, "n.pth does"),
        ("train --config folder --set data.root={good} --set backbone.weights=n.pth", 2,
         "n.pth doesn't exist"),
        ("evaluate --model {model} --good nowhere --output o", 2, "nowhere doesn't exist"),
        ("evaluate --model {model} --defects nowhere --output o", 2, "nowhere doesn't exist"),
        ("features --model {model} --input nowhere --output o.npz", 2, "nowhere doesn't exist"),
        ("calibrate --model {model} --good nowhere", 2, "--good nowhere doesn't exist"),
        ("update --model {model} --good nowhere --output o", 2, "--good nowhere doesn't exist"),
        ("update --model {model} --good {good} --defects nowhere --output o", 2,
         "--defects nowhere doesn't exist"),
        ("features --model {export} --input {good} --output o.npz", 2, "and no layers"),
        ("explain --model {export} --input {part} --output o", 2, "and no layers"),
        ("explain --model {model} --input {part} --output o --class 3", 2, "--class needs a"),
        ("explain --backbone resnet18 --input {part} --output o --good .", 2, "give --model too"),
        ("infer --model {model}/manifest.json --input {good} --output o", 2, "is a file; give the"),
        ("infer --model {model} --input {part} --output o --workers 2", 2, "--workers needs a Ray"),
        ("infer --model {model} --input none --output o", 2, "none doesn't exist (looked in /"),
        ("infer --model {model} --input {good}/x.png --output o", 2, "x.png doesn't exist; in /"),
        ("calibrate --model {model} --review-rate 2%", 2, "'2%' is no number; write 0.02"),
        ("calibrate --model {model} --threshold 3,6", 2, "'3,6' is no number; write 3.6"),
        ("calibrate --model {model} --threshold high", 2, "'high' is no number\n"),
        ("check --config {good}", 2, "`anomaly start` writes one"),
    ],
)  # fmt: skip
def test_told_without_torch(
    arguments: str, code: int, message: str, places: dict[str, Path], tmp_path: Path
) -> None:
    _check(arguments.format(**places), code, message, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--output e", "e/model exists already"),
        ("--output o --precision bf16", "ONNX Runtime doesn't compute"),
        ("--output o --precision bf16 --whole", "fp32 only"),
        ("--output o --model e", "e/model is an exported model"),
        ("--output o --golden nowhere", "--golden nowhere doesn't exist"),
        ("--output run --overwrite", "holds the model to export"),
        ("--output link --overwrite", "holds the model to export"),
        ("--output .", "holds the runs e, link, run, which a model in it would hide"),
        ("--output two --overwrite", "two/model holds a trained model, which an export doesn't"),
        ("--output run/model", "holds the model to export"),
        ("--output run/model/scores", "holds the model to export"),
    ],
)
def test_exports_that_cannot_be_are_told_without_torch(
    arguments: str, message: str, run_folder: Path, bank_export: Path, tmp_path: Path
) -> None:
    """And nothing is written: the model itself least of all."""
    shutil.copytree(run_folder, tmp_path / "run")
    shutil.copytree(bank_export, tmp_path / "e")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    if "two" in arguments:
        shutil.copytree(run_folder, tmp_path / "two")
    _check(f"export --to onnx --model run {arguments}", 2, message, tmp_path)
    assert {f.name for f in tmp_path.iterdir()} - {"two"} == {"run", "e", "link"}
