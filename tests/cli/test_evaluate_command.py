"""`evaluate`: many models, what isn't trained yet, what fails, and comparisons."""

import json
import shutil
from pathlib import Path

import cv2
from conftest import FAST, REPOSITORY, Command, write_product

import anomaly
from anomaly.report.category import training_of

EVALUATION = {"index.html", "metrics.json", "scores.csv"}
CATEGORY = {"report.html", "metrics.json", "scores.csv"}


def _names(folder: Path) -> set[str]:
    return {f.name for f in folder.iterdir()}


def test_one_model_failing_does_not_lose_the_others(
    run_folder: Path, padim_folder: Path, tmp_path: Path, command: Command
) -> None:
    shutil.copytree(padim_folder / "model", tmp_path / "alone")
    output = tmp_path / "out"
    code, out, err = command(
        "evaluate", ["--model", run_folder, tmp_path / "alone", padim_folder, "--output", output]
    )
    assert code == 3
    assert "--data-root" in err
    second = f"disc ({padim_folder})"
    assert "mean" not in out  # of figures of the same images
    metrics = json.loads((output / "metrics.json").read_text())
    assert list(metrics["categories"]) == ["disc", second]
    assert _names(output) >= EVALUATION
    folders = [f for f in output.iterdir() if f.is_dir()]
    assert len(folders) == 2
    assert all(_names(folder) == CATEGORY for folder in folders)
    index = (output / "index.html").read_text("utf-8")
    assert "not evaluated" in index
    assert 'href="disc/report.html"' in index
    figures = metrics["categories"]["disc"]
    # Three of each without an overlap say little: 0.025 ** (1 / 3) = 0.29 for any scores.
    low, high = figures["intervals"]["image_auroc"]
    assert (0.1 < low < 0.3, high) == (True, 1.0)
    low, high = figures["verdicts"]["escape_rate"]["interval"]
    assert 0 <= low <= figures["verdicts"]["escapes"] / 3 <= high <= 1
    verdicts = figures["verdicts"]
    assert verdicts["defective"]["reject"] == 3
    said = f"disc at its thresholds: of 3 good ones {verdicts['good']['reject']} rejected"
    assert said in out
    assert "of 3 defective ones 3 rejected, 0 to review, 0 called good" in out
    assert verdicts["false_rejects"] == verdicts["good"]["reject"]
    single = json.loads((output / "disc" / "metrics.json").read_text())
    assert single["categories"]["disc"] == figures


def test_configs_are_trained_once(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    base = REPOSITORY / "configs" / "folder.yaml"
    for name in ("disc", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}\nname: {name}\n")
    runs = tmp_path / "runs"
    shutil.copytree(run_folder, runs / "disc")
    data = ["data.format=mvtec", f"data.root={product.parent}", f"data.category={product.name}"]
    overrides = [part for setting in [*data, *FAST] for part in ("--set", setting)]
    arguments = ["--config", tmp_path / "disc.yaml", *overrides, "--runs", runs]
    both = ["--config", tmp_path / "disc.yaml", tmp_path / "two.yaml", *arguments[2:]]
    code, out, err = command("evaluate", [*both, "--output", tmp_path / "out"])
    assert code == 0, err
    assert ("trained disc" in out, "trained two" in out) == (False, True)
    other = [*arguments, "--set", "model.coreset_ratio=0.2", "--output", tmp_path / "other"]
    code, _, err = command("evaluate", other)
    assert code == 2
    assert "model.coreset_ratio is 0.1 there and 0.2 here" in err
    saved = runs / "disc" / "model" / "config.yaml"
    lines = saved.read_text().splitlines(keepends=True)
    saved.write_text("".join(li for li in lines if "leave_out_suspects" not in li))
    assert saved.read_text().count("\n") == len(lines) - 1
    code, _, err = command("evaluate", other)  # a run of before there was the setting
    assert (code, "coreset_ratio" in err, "leave_out" in err) == (2, True, False)
    saved.write_text("".join(lines))
    elsewhere = write_product(tmp_path / product.name).parent
    moved = [*arguments, "--set", f"data.root={elsewhere}", "--output", tmp_path / "moved"]
    code, _, err = command("evaluate", moved)
    assert (code, f"data folder is '{product}' there" in err) == (2, True), err


def test_infer_draws_side_by_side(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    image = product / "test" / "spot" / "000.png"
    arguments = ["--model", run_folder, "--input", image, "--output", tmp_path, "--side-by-side"]
    assert command("infer", arguments)[0] == 0
    (picture,) = [cv2.imread(str(f)) for f in (tmp_path / "heatmaps").iterdir()]
    assert picture.shape[0] > 96
    assert picture.shape[1] > 250
    assert (tmp_path / "heatmap_scale.png").is_file()


def test_the_record_of_another_models_training_is_not_shown(
    run_folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    detector = anomaly.load(run, device="cpu")
    assert training_of(run, detector.model_id)["bank_vectors"] > 0
    assert training_of(run, "0" * 16) == {}
    detector.calibrate(threshold=7, force=True).save(run / "model", overwrite=True)
    assert training_of(run, anomaly.load(run, device="cpu").model_id)["bank_vectors"] > 0
