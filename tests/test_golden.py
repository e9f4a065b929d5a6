"""What the commands made of fixed data when it was last recorded, and what they make of it now.

All in fp32, which every processor computes. On a machine like the one that recorded (processor
features, threads, packages) every byte of the models, every digit of the rows and of the figures is
the same; elsewhere scores agree within `SCORES`, and figures within `FIGURES`. Record anew, where a
change of bytes is meant:

    python tests/test_golden.py
"""

import hashlib
import json
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import REPOSITORY, SHARED, run_command, write_product
from kit import table

RECORDED = Path(__file__).with_name("golden.json")
SCORES = 0.02  # relative; which patches a bank holds may turn on the last digit of a distance
FIGURES = 0.01
# Of a row, what differs from run to run, and what names the version.
_PASSING = {"time", "milliseconds", "path", "model_id", "software_version", "image_sha256"}
_FIGURES = ("image_auroc", "image_ap", "pixel_auroc", "pixel_ap", "aupro")
BOTTLE = SHARED / "data" / "mvtec_ad" / "bottle"
WEIGHTS = SHARED / "weights" / "resnet50_v1_imagenet_stem_to_layer3.safetensors"
_SMALL = ["precision=fp32", "backbone.name=resnet18", "backbone.weights=random", "image.area=64"]
_SMALL_BANK = [*_SMALL, "model.coreset_ratio=0.1"]
_BOTTLE = [
    "precision=fp32",
    "backbone.name=resnet50_v1",
    f"backbone.weights={WEIGHTS}",
    "image.area=128",
]
_WHOLE: dict[str, tuple[str, list[str]]] = {
    "disc_patchcore": ("disc", _SMALL_BANK),
    "disc_padim": ("disc", [*_SMALL, "model.kind=padim", "model.dimensions=20"]),
    "disc_tiles": ("disc", [*_SMALL_BANK, "image.tile=64"]),
    "bottle_patchcore": ("bottle", [*_BOTTLE, "model.coreset_ratio=0.01"]),
    "bottle_padim": ("bottle", [*_BOTTLE, "model.kind=padim"]),
}


def machine() -> dict[str, Any]:
    """What bytes may hang on besides data, settings and code."""
    import torch

    from anomaly.runtime import has_bf16

    packages = ("torch", "torchvision", "numpy", "faiss-cpu", "opencv-python-headless")
    return {
        "processor": platform.machine(),
        # Kernels are chosen by all of these, and cut their work by the caches' sizes.
        "features": dict(sorted(torch.cpu.get_capabilities().items())),
        "bf16": str(has_bf16(torch.device("cpu"))),
        "threads": "2",
        **{name: version(name) for name in packages},
    }


def walk(data: Path, settings: list[str], folder: Path) -> dict[str, Any]:
    """Train, infer and evaluate on one category; what there is to compare."""
    chosen = ["data.format=mvtec", f"data.root={data.parent}", f"data.category={data.name}"]
    flags = [part for one in [*chosen, *settings] for part in ("--set", one)]
    common = ["--device", "cpu"]
    config = REPOSITORY / "configs" / "folder.yaml"
    run, results, figures = folder / "run", folder / "results", folder / "figures"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", machine()["threads"])
        run_command("train", ["--config", config, *flags, "--output", run, *common])
        where = ["--input", data / "test", "--output", results]
        run_command("infer", ["--model", run, *where, *common])
        run_command("evaluate", ["--model", run, "--output", figures, *common])
    rows = table(results)
    metrics = json.loads((figures / "metrics.json").read_text())["mean"]
    return {
        "model": {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted((run / "model").iterdir())
            if file.suffix in (".safetensors", ".png") or file.name == "calibration.json"
        },
        "rows": {
            str(Path(row["path"]).relative_to(data)): {
                key: value for key, value in row.items() if key not in _PASSING
            }
            for row in rows
        },
        "figures": {key: metrics[key] for key in _FIGURES if metrics.get(key) is not None},
    }


def _data(name: str, scratch: Path) -> Path:
    return BOTTLE if name == "bottle" else write_product(scratch / name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n.startswith("bottle") else ()) for n in _WHOLE],
)
def test_nothing_has_changed(name: str, tmp_path: Path) -> None:
    """Models, rows and figures are those that were recorded."""
    data, settings = _WHOLE[name]
    if data == "bottle" and not (BOTTLE.exists() and WEIGHTS.exists()):
        pytest.skip(f"{BOTTLE} or {WEIGHTS} is absent")
    recorded = json.loads(RECORDED.read_text())
    now, then = walk(_data(data, tmp_path), settings, tmp_path), recorded[name]
    if machine() == recorded["machine"]:
        assert now == then
        return
    assert now["rows"].keys() == then["rows"].keys()
    for path, row in now["rows"].items():
        score = float(then["rows"][path]["image_score"])
        assert float(row["image_score"]) == pytest.approx(score, rel=SCORES), path
    assert now["figures"] == pytest.approx(then["figures"], abs=FIGURES)


def _record() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (data, settings) in _WHOLE.items():
        with TemporaryDirectory() as scratch:
            yield name, walk(_data(data, Path(scratch)), settings, Path(scratch))


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({"machine": machine(), **dict(_record())}, indent=1) + "\n")
