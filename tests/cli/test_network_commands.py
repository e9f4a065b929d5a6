"""`layers`, `features` and `explain` from end to end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision
from conftest import Command, train_arguments, write_part
from families import FAMILIES, quick_and_slow

# One of each of torchvision's families.
OTHERS = ["alexnet", "inception_v3", "maxvit_t", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t"]
OTHERS += ["vit_b_32"]
NETWORKS = quick_and_slow([*FAMILIES, *OTHERS], "resnet18", "timm/tf_efficientnet_lite2")
SQUARE = {"vit_b_32", "swin_t", "maxvit_t"}  # Swin and MaxViT cut images into windows of 7


def test_layers_as_text_says_what_is_hooked(run_folder: Path, command: Command) -> None:
    code, out, _ = command("layers", ["--backbone", "mobilenet_v2", "--depth", 2])
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "96×14×14" in lines["features.13"]
    assert lines["features.13"].split()[3:] == [
        "16",
        "118,272",
        "69.8%",
        "patchcore,",
        "padim",
    ]
    assert lines["features.3"].endswith("  padim")
    assert "features.0.0" not in lines
    assert "stops after features.13, at 69.8% of them" in out

    code, out, _ = command("layers", ["--model", run_folder, "--depth", 1])
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.endswith("hooked")] == [
        "layer",
        "layer2",
        "layer3",
    ]
    assert "this model stops after layer3" in out


def test_layers_as_json(command: Command) -> None:
    arguments = ["--backbone", "resnet18", "--input-size", 64, "--json"]
    code, out, _ = command("layers", arguments)
    assert code == 0
    values = json.loads(out)
    assert (values["network"], values["input_size"]) == ("resnet18", 64)
    layers = {layer["path"]: layer for layer in values["layers"]}
    assert set(layers) == {name for name, _ in torchvision.models.resnet18().named_modules()}
    assert layers["layer2"]["shape"] == [1, 128, 8, 8]
    assert layers["layer2"]["stride"] == 8
    assert layers["layer2"]["hooked"] == ["patchcore", "padim"]
    assert layers["layer2"]["parameters"] == 525_568
    assert 0 < layers["layer1"]["compute_share"] < layers["layer2"]["compute_share"] < 1
    several = {path for path, layer in layers.items() if layer["runs"] != 1}
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert several == {f"{block}.relu" for block in blocks}
    assert layers["layer2.0.relu"]["runs"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbone", "resnet19"], "did you mean"),
        (["--backbone", "resnet18", "--input-size", 0], "--input-size is 0"),
        (["--backbone", "vit_b_16", "--input-size", 96], "doesn't take images of 96×96"),
        (["--model", "nowhere"], "no model at nowhere"),
    ],
)
def test_layers_says_what_is_wrong(arguments: list[Any], message: str, command: Command) -> None:
    code, out, err = command("layers", arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_features_are_those_of_the_network(product: Path, tmp_path: Path, command: Command) -> None:
    """The rows equal torchvision's own network run by hand."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "own.pth")
    images = product / "test" / "good"
    code, out, _ = command(
        "features",
        ["--backbone", "resnet18", "--weights", tmp_path / "own.pth", "--layers", "layer1[-1]",
         "avgpool", "--input", images, "--output", tmp_path / "out.npz", "--input-size", 96,
         "--square", "--batch-size", 2],
    )  # fmt: skip
    assert code == 0
    assert "3 images saved" in out
    saved = np.load(tmp_path / "out.npz")
    assert [Path(path).name for path in saved["paths"]] == ["000.png", "001.png", "002.png"]
    preset = torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for row, path in enumerate(saved["paths"]):
        picture = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB).astype(np.float32) / 255
        small = cv2.resize(picture, (96, 96), interpolation=cv2.INTER_AREA)
        x = preset(torch.from_numpy(small).permute(2, 0, 1)[None])
        with torch.no_grad():
            x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
            layer1 = network.layer1(x)
            last = network.layer4(network.layer3(network.layer2(layer1)))
        expected = {"layer1.1": layer1.mean((2, 3)), "avgpool": last.mean((2, 3))}
        for layer, value in expected.items():
            np.testing.assert_allclose(saved[layer][row], value[0].numpy(), rtol=1e-3, atol=1e-4)


def test_features_of_a_model_keep_whole_maps_when_told(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    arguments = ["--model", run_folder, "--input", product / "test", "--pool", "none"]
    assert command("features", [*arguments, "--output", tmp_path / "maps.npz"])[0] == 0
    saved = np.load(tmp_path / "maps.npz")
    assert saved["layer2"].shape[:2] == (6, 24)
    assert saved["layer2"].ndim == 4
    assert command("features", [*arguments[:4], "--output", tmp_path / "mean.npz"])[0] == 0
    mean = saved["layer2"].mean(axis=(2, 3))
    np.testing.assert_allclose(np.load(tmp_path / "mean.npz")["layer2"], mean, rtol=1e-3, atol=1e-5)
    for option in (
        ["--layers", "layer1"], ["--weights", "random"], ["--input-size", 64], ["--square"],
    ):  # fmt: skip
        code, _, err = command("features", [*arguments, *option, "--output", tmp_path / "late.npz"])
        assert (code, f"{option[0]} needs --backbone; a model already has it" in err) == (2, True)
    code, _, err = command("features", [*arguments, "--output", tmp_path / "features"])
    assert (code, "must end in .npz" in err) == (2, True)


def arguments_of(images: Path, output: Path, *more: object) -> list[object]:
    base = ["--backbone", "resnet18", "--weights", "random", "--layers", "layer1"]
    return [*base, "--input-size", 64, "--input", images, "--output", output, *more]


def test_bad_files_are_named_and_the_rest_goes_on(tmp_path: Path, command: Command) -> None:
    images, output = tmp_path / "images", tmp_path / "out.npz"
    for i in range(3):
        write_part(images / f"{i}.png", seed=i)
    (images / "broken.png").write_bytes(b"not a picture")
    code, out, err = command("features", arguments_of(images, output))
    assert (code, "3 images saved" in out) == (3, True)
    assert "broken.png" in err
    assert [Path(path).name for path in np.load(output)["paths"]] == ["0.png", "1.png", "2.png"]
    write_part(images / "broken.png", seed=9)
    code, _, err = command("features", arguments_of(images, output))
    assert (code, "add --overwrite" in err) == (2, True)
    assert command("features", arguments_of(images, output, "--overwrite"))[0] == 0
    assert len(np.load(output)["paths"]) == 4

    only_broken = tmp_path / "nothing"
    only_broken.mkdir()
    (only_broken / "a.png").write_bytes(b"")
    code, _, err = command("features", arguments_of(only_broken, tmp_path / "none.npz"))
    assert (code, "no image can be used" in err) == (2, True)
    code, _, err = command("features", arguments_of(images, tmp_path / "x.npz", "--layers", ""))
    assert (code, "--layers has an empty name" in err) == (2, True)


def test_an_interrupted_run_leaves_the_earlier_file(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, output = tmp_path / "images", tmp_path / "out.npz"
    write_part(images / "0.png", seed=0)
    output.write_bytes(b"of an earlier run")

    def interrupted(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    code, _, err = command("features", arguments_of(images, output, "--overwrite"))
    assert (code, err.splitlines()[-1]) == (130, "interrupted")
    assert output.read_bytes() == b"of an earlier run"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["images", "out.npz"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbone", "vit_b_32", "--layers", "encoder.ln"], "add --square to squash"),
        (["--backbone", "squeezenet1_1"], "anomaly layers --backbone squeezenet1_1"),
        (["--backbone", "resnet18", "--layers", "layer9"], "did you mean"),
        (["--backbone", "resnet18", "--batch-size", 0], "--batch-size must be 1 or more"),
    ],
)
def test_features_says_what_is_wrong(
    arguments: list[Any], message: str, product: Path, tmp_path: Path, command: Command
) -> None:
    images = ["--input", product / "test" / "good", "--weights", "random"]
    images += ["--output", tmp_path / "f.npz"]
    code, _, err = command("features", [*arguments, *images])
    assert code == 2
    assert message in err


def test_explain_a_score(
    resnet_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    image = product / "test" / "spot" / "000.png"
    output = tmp_path / "why"
    code, out, err = command(
        "explain", ["--model", resnet_folder, "--input", image, "--output", output]
    )
    assert (code, err) == (0, "")
    facts = json.loads((output / "explanation.json").read_text())
    assert facts["verdict"] == "reject"
    # The image score is the highest value of the blurred map.
    assert 0.5 < facts["image_score"] / facts["patches"][0]["score"] <= 1
    # The worst patch lies on the red square, which reaches from (30, 40) to (40, 50).
    worst = facts["patches"][0]
    assert abs((worst["row"] + 0.5) * 96 / 7 - 35) < 20
    assert worst["compared_with"][0]["distance"] == pytest.approx(worst["score"], rel=1e-3)
    assert facts["not_shown"] == []
    assert facts["pictures"] == [
        "feature_maps_layer2.png",
        "feature_maps_layer3.png",
        "score_gradient.png",
    ]
    for name in facts["pictures"]:
        assert cv2.imread(str(output / name)).shape[1] > 400
        assert name in out
    assert "reject, score" in out
    code, _, err = command(
        "explain", ["--model", resnet_folder, "--input", image, "--output", output]
    )
    assert code == 2
    assert "--overwrite" in err


def test_explain_calls_what_isnt_our_part_what_infer_calls_it(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    image = tmp_path / "black.png"
    cv2.imwrite(str(image), np.zeros((96, 120, 3), np.uint8))
    output = tmp_path / "why"
    code, out, _ = command("explain", ["--model", run_folder, "--input", image, "--output", output])
    facts = json.loads((output / "explanation.json").read_text())
    assert (code, facts["verdict"], "a blank image" in facts["reason"]) == (0, "reject", True)
    assert facts["reason"] in out


def test_explain_with_a_model_and_a_classifier_of_like_layers(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    image = product / "test" / "spot" / "000.png"
    output = tmp_path / "why"
    arguments = ["--model", run_folder, "--backbone", "resnet18", "--weights", "random"]
    code, out, _ = command("explain", [*arguments, "--input", image, "--output", output])
    assert code == 0
    assert re.search(r"^class \d+ .+: [\d.]+ %$", out, re.MULTILINE)
    ours, theirs = (
        (output / f"{before}feature_maps_layer2.png").read_bytes() for before in ("", "classifier_")
    )
    assert ours != theirs
    facts = json.loads((output / "explanation.json").read_text())
    assert {p.name for p in output.glob("*.png")} == set(facts["pictures"])
    again = [*arguments[:2], "--input", image, "--output", output, "--overwrite"]
    assert command("explain", again)[0] == 0
    assert not list(output.glob("classifier_*"))


def test_explain_says_that_the_training_images_are_gone(
    product: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    image = product / "test" / "spot" / "000.png"
    # Alone, it doesn't say where the data set is.
    model = shutil.copytree(run_folder / "model", tmp_path / "model")
    arguments = ["--model", model, "--input", image, "--output"]
    empty = tmp_path / "empty"
    empty.mkdir()
    code, out, _ = command("explain", [*arguments, tmp_path / "a", "--good", empty])
    assert code == 0
    assert "not shown: " in out
    assert "not found); name their folder with --good" in out
    assert (tmp_path / "a" / "explanation.html").is_file()
    code, out, _ = command(
        "explain", [*arguments, tmp_path / "b", "--good", product / "train" / "good"]
    )
    assert code == 0
    assert "not shown" not in out
    code, _, err = command("explain", [*arguments, tmp_path / "c", "--good", tmp_path / "absent"])
    assert code == 2
    assert "absent isn't a folder" in err


def test_explain_padim_and_a_model_without_threshold(
    product: Path, padim_folder: Path, tmp_path: Path, command: Command
) -> None:
    image = product / "test" / "spot" / "001.png"
    arguments = ["--model", padim_folder, "--input", image, "--output", tmp_path / "padim"]
    code, out, _ = command("explain", arguments)
    assert code == 0
    assert "not shown: nearest good patches: PaDiM keeps none" in out
    facts = json.loads((tmp_path / "padim" / "explanation.json").read_text())
    assert facts["patches"][0]["compared_with"][0]["distance"] is None

    run = tmp_path / "run"
    assert command("train", [*train_arguments(product, run), "--no-calibrate"])[0] == 0
    arguments = ["--model", run, "--input", image, "--output", tmp_path / "free"]
    assert command("explain", arguments)[0] == 0
    facts = json.loads((tmp_path / "free" / "explanation.json").read_text())
    assert "threshold" not in facts
    assert len(facts["patches"]) == 1


@pytest.mark.parametrize("name", NETWORKS)
def test_every_family_is_described_saved_and_explained(
    name: str, product: Path, tmp_path: Path, command: Command
) -> None:
    size = 224 if name in SQUARE else 96
    image = product / "test" / "spot" / "000.png"
    base = ["--backbone", name, "--input-size", size]
    code, out, _ = command("layers", [*base, "--json"])
    assert code == 0
    layers = json.loads(out)["layers"]
    maps = [x["path"] for x in layers if x["stride"] and x["path"] and x["runs"] == 1]
    torch.manual_seed(0)

    base += ["--weights", "random", "--input", image]
    square = ["--square"] if name in SQUARE else []
    code, _, err = command(
        "features", [*base, *square, "--layers", maps[0], maps[-1], "--output", tmp_path / "f.npz"]
    )
    assert code == 0, err
    saved = np.load(tmp_path / "f.npz")
    assert len(saved.files) == 3
    for values in (saved[name] for name in saved.files if name != "paths"):
        assert values.shape[0] == 1
        assert np.isfinite(values).all()

    code, _, err = command("explain", [*base, "--class", 3, "--output", tmp_path / "e"])
    assert code == 0, err
    facts = json.loads((tmp_path / "e" / "explanation.json").read_text())
    assert facts["classes"][0]["index"] == 3
    assert any(picture.startswith("feature_maps_") for picture in facts["pictures"])
    assert "grad_cam.png" in facts["pictures"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model, --backbone, or both"),
        (["--backbone", "resnet18", "--class", 1000], "resnet18 has classes 0 to 999"),
    ],
)
def test_explain_says_what_is_wrong(
    arguments: list[Any], message: str, product: Path, tmp_path: Path, command: Command
) -> None:
    image = product / "test" / "good" / "000.png"
    base = ["--input", image, "--output", tmp_path, "--weights", "random", "--input-size", 64]
    code, _, err = command("explain", [*base, *arguments])
    assert code == 2
    assert message in err


def test_explain_takes_one_readable_image(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    for image, message in [(tmp_path, "isn't a file"), (broken, "broken.png")]:
        code, _, err = command(
            "explain", ["--model", run_folder, "--input", image, "--output", tmp_path / "o"]
        )
        assert code == 2
        assert message in err
