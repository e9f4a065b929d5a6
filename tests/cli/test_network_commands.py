"""`layers`, `features` and `explain` from end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torchvision
from conftest import Command, Says
from kit import tiny

import anomaly


def test_layers_say_what_is_hooked(run_folder: Path, says: Says) -> None:
    said = says(0, "layers", ["--backbone", "mobilenet_v2"])
    lines = {line.split()[0]: line for line in said.splitlines() if line}
    assert "96×14×14" in lines["features.13"]
    figures = ["16", "118,272", "69.8%", "patchcore,", "padim"]
    assert lines["features.13"].split()[3:] == figures
    assert lines["features.3"].endswith("  padim")
    assert "stops after features.13, at 69.8% of them" in said

    said = says(0, "layers", ["--model", run_folder])
    hooked = [line.split()[0] for line in said.splitlines() if line.endswith("hooked")]
    assert hooked == ["layer", "layer2", "layer3"]
    assert "this model stops after layer3" in said


def test_features_are_those_of_the_network(product: Path, tmp_path: Path, says: Says) -> None:
    """The rows equal torchvision's own network run by hand."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "own.pth")
    images = product / "test" / "good"
    arguments = ["--backbone", "resnet18", "--weights", tmp_path / "own.pth", "--input", images]
    layers = ["--layers", "layer1[-1]", "avgpool", "--output", tmp_path / "out.npz"]
    assert "3 images saved" in says(0, "features", [*arguments, *layers])
    saved = np.load(tmp_path / "out.npz")
    assert [Path(path).name for path in saved["paths"]] == ["000.png", "001.png", "002.png"]
    preset = torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for row, path in enumerate(saved["paths"]):
        picture = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB).astype(np.float32) / 255
        small = cv2.resize(picture, (256, 192), interpolation=cv2.INTER_LINEAR)
        x = preset(torch.from_numpy(small).permute(2, 0, 1)[None])
        with torch.no_grad():
            x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
            layer1 = network.layer1(x)
            last = network.layer4(network.layer3(network.layer2(layer1)))
        expected = {"layer1.1": layer1.mean((2, 3)), "avgpool": last.mean((2, 3))}
        for layer, value in expected.items():
            np.testing.assert_allclose(saved[layer][row], value[0].numpy(), rtol=1e-3, atol=1e-4)


def test_features_of_a_model_keep_whole_maps_when_told_and_bad_files_are_named(
    run_folder: Path, product: Path, tmp_path: Path, says: Says
) -> None:
    images = Path(shutil.copytree(product / "test" / "good", tmp_path / "images"))
    (images / "broken.png").write_bytes(b"not a picture")
    maps, means = tmp_path / "maps.npz", tmp_path / "means.npz"
    arguments = ["--model", run_folder, "--input", images]
    said = says(3, "features", [*arguments, "--pool", "none", "--output", maps])
    assert ("3 images saved" in said, "broken.png" in said) == (True, True)
    saved = np.load(maps)
    assert [Path(path).name for path in saved["paths"]] == ["000.png", "001.png", "002.png"]
    assert saved["layer2"].shape[:2] == (3, 24)
    assert saved["layer2"].ndim == 4
    says(3, "features", [*arguments, "--output", means])
    mean = saved["layer2"].mean(axis=(2, 3))
    np.testing.assert_allclose(np.load(means)["layer2"], mean, rtol=1e-3, atol=1e-5)
    assert "add --overwrite" in says(2, "features", [*arguments, "--output", maps])


def test_what_a_network_cannot_do_is_told(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    part = product / "test" / "good" / "000.png"
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    random = ["--weights", "random", "--input", part, "--output"]
    features = [*random, tmp_path / "f.npz"]
    model = ["--model", run_folder, "--output", tmp_path / "o"]
    for name, arguments, says in (
        ("layers", ["--backbone", "resnet19"], "did you mean"),
        ("layers", ["--backbone", "resnet18", "--input-size", 0], "--input-size is 0"),
        ("layers", ["--backbone", "vit_b_16", "--input-size", 96], "doesn't take images of 96×96"),
        ("features", ["--backbone", "squeezenet1_1", *features],
         "anomaly layers --backbone squeezenet1_1"),
        ("features", ["--backbone", "resnet18", "--layers", "layer9", *features], "did you mean"),
        ("features", ["--backbone", "resnet18", "--layers", "", *features], "has an empty name"),
        ("features", ["--model", run_folder, "--input", broken, *features[4:]],
         "no image can be used"),
        ("explain", [*model, tmp_path], "isn't a file"),
        ("explain", [*model, broken], "broken.png"),
    ):  # fmt: skip
        code, out, err = command(name, arguments)
        assert (code, out, says in err) == (2, "", True), err


def test_explain_a_score(explained: Path) -> None:
    facts = json.loads((explained / "explanation.json").read_text())
    assert facts["verdict"] == "reject"
    worst = facts["patches"][0]
    assert worst["compared_with"][0]["distance"] == pytest.approx(worst["score"], rel=1e-3)
    assert facts["not_shown"] == []
    assert facts["pictures"] == [
        "feature_maps_layer2.png",
        "feature_maps_layer3.png",
        "score_gradient.png",
    ]
    for name in facts["pictures"]:
        assert cv2.imread(str(explained / name)).shape[1] > 400


def test_explain_calls_what_isnt_our_part_what_infer_calls_it(
    run_folder: Path, tmp_path: Path, says: Says
) -> None:
    image = tmp_path / "black.png"
    cv2.imwrite(str(image), np.zeros((96, 120, 3), np.uint8))
    output = tmp_path / "why"
    said = says(0, "explain", [image, "--model", run_folder, "--output", output])
    facts = json.loads((output / "explanation.json").read_text())
    assert (facts["verdict"], "a blank image" in facts["reason"]) == ("reject", True)
    assert facts["reason"] in said


def test_explain_says_what_it_cannot_show(
    product: Path, run_folder: Path, tmp_path: Path, says: Says
) -> None:
    settings = tiny(model={"kind": "padim", "dimensions": 20})
    free = anomaly.fit(product / "train" / "good", settings, device="cpu", calibrate=False)
    free.save(tmp_path / "free")
    # Alone, a model doesn't say where the data set is.
    alone = shutil.copytree(run_folder / "model", tmp_path / "alone")
    (tmp_path / "empty").mkdir()
    for model, good, lacks in (
        (tmp_path / "free", product / "train" / "good", False),
        (alone, tmp_path / "empty", True),
    ):
        image = product / "test" / "spot" / "001.png"
        arguments = [image, "--model", model, "--good", good]
        output = tmp_path / f"why {model.name}"
        said = says(0, "explain", [*arguments, "--output", output])
        assert ("; name their folder with --good" in said) == lacks
        assert (output / "explanation.html").is_file()
    facts = json.loads((tmp_path / "why free" / "explanation.json").read_text())
    assert facts["patches"][0]["compared_with"][0]["distance"] is None
    assert "threshold" not in facts
    assert len(facts["patches"]) == 1
