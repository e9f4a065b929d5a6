"""Several products: `train` makes a run for each, `infer` tells which one an image shows."""

import csv
import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, result_files, train_products_arguments

import anomaly
from anomaly.backbones.extractor import FeatureExtractor
from anomaly.storage.folder import find_products
from anomaly.storage.save import save

PRODUCTS = ("disc", "stripes")


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "results.csv").read_text("utf-8"))))


def infer(command: Command, model: Path, output: Path, *more: object) -> tuple[int, str, str]:
    return command("infer", ["--model", model, "--output", output, "--device", "cpu", *more])


def test_every_row_says_which_product_it_was_scored_as(
    product_runs: Path, two_products: Path, tmp_path: Path, command: Command
) -> None:
    inputs = [two_products / product / "test" for product in PRODUCTS]
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    more = ("--input", *inputs, broken, "--regions", "--masks", "--side-by-side")
    code, out, err = infer(command, product_runs, tmp_path / "out", *more)
    assert code == 3, err
    assert "  disc: 6 images: " in out
    rows = rows_of(tmp_path / "out")
    assert list(rows[0])[-1] == "product"
    (unscored,) = [row for row in rows if not row["product"]]
    assert unscored["status"] == "unsupported"
    assert unscored["threshold"] == ""
    assert len(rows) == 13
    for product in PRODUCTS:
        alone = tmp_path / product
        paths = ("--input", two_products / product / "test")
        assert infer(command, product_runs / product, alone, *paths)[0] == 0
        mine = [row for row in rows if row["product"] == product]
        for one, other in zip(mine, rows_of(alone), strict=True):
            assert other["product"] == ""
            assert one["model_name"] == product
            same = one.keys() - {"product", "time", "milliseconds", "heatmap"}
            assert {key: one[key] for key in same} == {key: other[key] for key in same}
    drawn = tmp_path / "out" / "heatmap_scales" / "disc.png"
    assert drawn.read_bytes() == (tmp_path / "disc" / "heatmap_scale.png").read_bytes()
    index = (tmp_path / "out" / "results.html").read_text("utf-8")
    assert "12 of 13 images scored" in index
    assert "1 couldn't be scored: each page names them" in index
    for product in PRODUCTS:
        page = (tmp_path / "out" / "pages" / f"{product}.html").read_text("utf-8")
        assert "broken.png" in page
        mine = [row for row in rows if row["product"] == product]
        counts = [sum(row["verdict"] == v for row in mine) for v in ("good", "review", "reject")]
        cells = "".join(f"<td>{count}</td>" for count in (len(mine), *counts))
        assert f'href="pages/{product}.html"><bdi>{product}</bdi></a></th>{cells}' in index
        assert all(f'"../{row["heatmap"]}"' in page for row in mine)
    assert infer(command, product_runs, tmp_path / "out", *more, "--resume")[0] == 3
    assert infer(command, product_runs, tmp_path / "out", *more, "--overwrite")[0] == 3


def test_a_run_over_products_goes_on_where_it_was_broken_off(
    product_runs: Path, two_products: Path, tmp_path: Path, command: Command
) -> None:
    more = ("--input", two_products / "disc" / "test", two_products / "stripes" / "test")
    assert infer(command, product_runs, tmp_path / "whole", *more)[0] == 0
    done = json.loads((tmp_path / "whole" / "results.done.json").read_text())
    lines = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()
    batch = [{"index": i, "row": json.loads(line), "regions": []} for i, line in enumerate(lines)]
    journal = [json.dumps({"about": done["about"]}), json.dumps({"images": batch[:8]})]
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    (tmp_path / "half" / "results.done.json").unlink()
    (tmp_path / "half" / "results.partial.jsonl").write_text("\n".join(journal) + "\n")
    assert infer(command, product_runs, tmp_path / "half", *more, "--resume")[0] == 0
    # The rest is a batch of its own, in which the last digits may be others.
    scores = [
        [float(row["image_score"]) for row in rows_of(tmp_path / n)] for n in ("whole", "half")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    given = infer(command, product_runs, tmp_path / "half", *more, "--resume", "--product", "disc")
    assert given[0] == 2
    assert "another model" in given[2]


def test_the_product_can_be_given(
    product_runs: Path, two_products: Path, tmp_path: Path, command: Command
) -> None:
    more = ("--input", two_products / "stripes" / "test", "--product", "disc")
    code, out, _ = infer(command, product_runs, tmp_path / "out", *more)
    assert code == 0
    assert "looks like stripes, not disc" in out
    rows = rows_of(tmp_path / "out")
    assert {(row["product"], row["verdict"]) for row in rows} == {("disc", "review")}
    assert (tmp_path / "out" / "results.html").is_file()
    assert (tmp_path / "out" / "heatmap_scale.png").is_file()
    for model, name, said in (
        (product_runs, "bottle", "no product 'bottle'; it has disc, stripes"),
        (product_runs / "disc", "disc", "the model of one product"),
        (tmp_path, "disc", "holds no model"),
    ):
        code, _, err = infer(command, model, tmp_path / "x", "--input", tmp_path, "--product", name)
        assert code == 2
        assert said in err
    assert not (tmp_path / "x").exists()


def test_other_commands_ask_for_one_of_the_models(
    product_runs: Path, tmp_path: Path, command: Command
) -> None:
    for name, more in (("calibrate", ["--threshold", 1]), ("selfcheck", ["--golden", tmp_path])):
        code, _, err = command(name, ["--model", product_runs, *more])
        assert code == 2
        assert f"holds several models (disc, stripes); give one of them, {product_runs}" in err


@pytest.mark.parametrize(
    "rest",
    [("train.json",), ("model/scorer.safetensors",), ("backbone.safetensors",), ("model",)],
    ids=["no model", "run", "model folder", "nothing in it yet"],
)
def test_a_product_that_was_copied_by_halves_is_named(
    product_runs: Path, tmp_path: Path, command: Command, rest: tuple[str, ...]
) -> None:
    parts, half = tmp_path / "parts", tmp_path / "parts" / "plate"
    shutil.copytree(product_runs, parts)
    (parts / "notes" / "data").mkdir(parents=True)  # no product
    (parts / "notes" / "data" / "train.json").write_text("{}")
    assert [*find_products(parts)] == [*PRODUCTS]
    for name in rest:
        source = product_runs / "disc" / name
        (half / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "backbone.safetensors":
            source = product_runs / "disc" / "model" / name
        (half / name).mkdir() if source.is_dir() else shutil.copyfile(source, half / name)
    for name, more in (
        ("infer", ["--input", tmp_path]),
        ("evaluate", []),
        ("calibrate", ["--threshold", 1]),
        ("serve", []),
    ):
        option = "--models" if name == "serve" else "--model"
        output = [] if name in ("serve", "calibrate") else ["--output", tmp_path / "out"]
        code, _, err = command(name, [option, parts, *output, *more])
        assert code == 2
        assert f"{half} holds parts of a model, but no manifest.json in it" in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--good", "--defects"])
def test_images_of_one_product_are_not_taken_for_those_of_all(
    product_runs: Path, two_products: Path, tmp_path: Path, command: Command, option: str
) -> None:
    images = two_products / "disc" / "test" / ("good" if option == "--good" else "spot")
    arguments = [option, images, "--output", tmp_path / "out"]
    code, _, err = command("evaluate", ["--model", product_runs, *arguments])
    assert code == 2
    assert f"evaluate one product at a time, e.g. with --model {product_runs / 'disc'}" in err
    assert not (tmp_path / "out").exists()
    code, _, err = command("evaluate", ["--model", product_runs / "disc", *arguments])
    assert code == 0, err


def train(command: Command, *arguments: Any) -> tuple[int, str, str]:
    return command("train", train_products_arguments(*arguments))


def test_what_is_trained_stays_where_a_product_fails(
    two_products: Path, tmp_path: Path, command: Command
) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    shutil.copytree(two_products, data)
    good = data / "stripes" / "train" / "good"
    for file in good.iterdir():
        file.write_bytes(b"no image")
    code, out, err = train(command, data, runs)
    assert code == 3
    assert "error: stripes: " in err
    assert "stripes, product 2 of 2" in out
    assert "trained disc" in out
    first = result_files(runs / "disc" / "model")
    shutil.rmtree(good)
    shutil.copytree(two_products / "stripes" / "train" / "good", good)
    code, out, err = train(command, data, runs)
    assert code == 0, err
    assert "disc is already trained with these settings and is kept" in out
    assert "trained stripes" in out
    assert "trained disc" not in out
    assert result_files(runs / "disc" / "model") == first
    code, _, err = train(command, data, runs, "model.coreset_ratio=0.2")
    assert code == 2
    assert "--overwrite trains all products again" in err
    arguments = [*train_products_arguments(data, runs, "model.coreset_ratio=0.2"), "--overwrite"]
    assert command("train", arguments)[0] == 0
    assert result_files(runs / "disc" / "model") != first


def test_a_missing_product_is_told_before_any_is_trained(
    two_products: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    code, _, err = train(command, two_products, tmp_path / "runs", "data.category=[disc, bottle]")
    assert code == 2
    assert "no folder 'bottle'" in err
    assert not (tmp_path / "runs").exists()
    shutil.copytree(run_folder, tmp_path / "single")
    code, _, err = train(command, two_products, tmp_path / "single")
    assert code == 2
    assert "holds the run of one model" in err


def test_each_product_is_checked_and_evaluated(
    two_products: Path, product_runs: Path, tmp_path: Path, command: Command
) -> None:
    config = tmp_path / "both.yaml"
    shutil.copytree(product_runs, tmp_path / "runs" / "both")
    settings = (product_runs / "disc" / "model" / "config.yaml").read_text()
    changed = settings.replace("name: disc", "name: both").replace(
        "category: disc", f"category: [disc, stripes]\n  root: {two_products}"
    )
    config.write_text(changed)
    code, out, _ = command("check", ["--config", config])
    assert code == 0
    assert f"{two_products / 'stripes'}\n" in out
    code, out, _ = command("check", ["--config", config, "--json"])
    assert [Path(one["folder"]).name for one in json.loads(out)] == list(PRODUCTS)
    how = ["--runs", tmp_path / "runs", "--device", "cpu"]
    output = tmp_path / "evaluation"
    code, out, err = command("evaluate", ["--config", config, "--output", output, *how])
    assert code == 0, err
    assert "trained disc" not in out
    for product in PRODUCTS:
        assert f"{product}: 6 of 6 test images are recognised as it\n" in out
    figures = json.loads((output / "metrics.json").read_text())["categories"]
    assert list(figures) == list(PRODUCTS)
    arguments = ["--model", product_runs, "--output", tmp_path / "again"]
    assert command("evaluate", arguments)[0] == 0
    few = anomaly.load(tmp_path / "runs" / "both" / "disc", "cpu").model
    save(
        replace(few, training_statistics=None),
        tmp_path / "runs" / "both" / "disc" / "model",
        overwrite=True,
    )
    arguments = ["--model", tmp_path / "runs" / "both", "--output", tmp_path / "few"]
    code, out, err = command("evaluate", arguments)
    assert code == 0
    assert "can't be recognised" in err
    assert {f.name for f in (tmp_path / "again").iterdir()} >= {"index.html", *PRODUCTS}


def test_telling_products_apart_costs_no_further_pass(
    two_products: Path,
    product_runs: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = tmp_path / "data"
    shutil.copytree(two_products, data)
    shutil.copy(data / "stripes" / "test" / "good" / "012.png", data / "disc" / "test" / "good")
    seen: list[int] = []
    run = FeatureExtractor.__call__

    def counted(self: FeatureExtractor, batch: Any) -> Any:
        seen.append(len(batch))
        return run(self, batch)

    monkeypatch.setattr(FeatureExtractor, "__call__", counted)
    where = ["--output", tmp_path / "evaluation", "--data-root", data, "--device", "cpu"]
    code, out, err = command("evaluate", ["--model", product_runs, *where])
    assert code == 0, err
    assert "disc: 6 of 7 test images are recognised as it, 1 for stripes\n" in out
    assert "stripes: 6 of 6 test images are recognised as it\n" in out
    assert sum(seen) == 13
    paths = sorted((data / "disc" / "test").rglob("*.png"))
    found = anomaly.load(product_runs, "cpu").predict(paths)
    assert Counter(one.product for one in found) == {"disc": 6, "stripes": 1}


def test_a_folder_that_holds_one_run_is_that_of_one_product(
    product_runs: Path, two_products: Path, tmp_path: Path, command: Command
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(product_runs / "disc", runs / "disc")
    tested = ("--input", two_products / "disc" / "test")
    code, _, err = infer(command, runs, tmp_path / "out", *tested)
    assert code == 0
    assert f"{runs} holds one run, disc, which scores all images" in err
    code, _, err = infer(command, runs / "disc", tmp_path / "alone", *tested)
    assert (code, "holds one run" in err) == (0, False)
    rows, alone = rows_of(tmp_path / "out"), rows_of(tmp_path / "alone")
    assert {row["product"] for row in rows} == {"disc"}
    same = rows[0].keys() - {"product", "time", "milliseconds"}
    assert [[row[key] for key in same] for row in rows] == [
        [row[key] for key in same] for row in alone
    ]
    code, out, _ = command("evaluate", ["--model", runs, "--output", tmp_path / "evaluation"])
    assert code == 0
    assert (tmp_path / "evaluation" / "disc" / "report.html").is_file()
    assert "are recognised as it" not in out
    code, _, err = command("calibrate", ["--model", runs, "--threshold", 1])
    assert (code, f"holds one; give that: {runs / 'disc'}" in err) == (2, True)


def test_a_list_of_one_product_trains_a_folder_of_one_run(
    two_products: Path, tmp_path: Path, command: Command
) -> None:
    code, out, _ = train(command, two_products, tmp_path / "runs", "data.category=[disc]")
    assert code == 0
    assert "recognises the product in each image" not in out
    assert (tmp_path / "runs" / "disc" / "model").is_dir()


def test_a_single_name_trains_as_ever(two_products: Path, tmp_path: Path, command: Command) -> None:
    listed = train_products_arguments(two_products, tmp_path / "one", "data.category=disc")
    assert command("train", listed)[0] == 0
    assert (tmp_path / "one" / "model").is_dir()
