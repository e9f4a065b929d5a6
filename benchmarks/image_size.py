"""Square (`image.resize: 256`) against kept aspect (`image.area: 256`): PatchCore 1 %, or others.

    python -m benchmarks.image_size --weights FILE.safetensors --data bottle magnetic_tile
        [--set model.kind=padim]

Each data set is a folder in MVTec AD layout. Figures are means over the seeds; seconds are those of
the whole commands, start of the program included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.inputs import machine
from benchmarks.process import run

# How an image reaches the network, and settings of it. Image scores are the map's maximum for all.
SIZES = {"resize": ["image.resize=256"], "area": ["image.area=256"]}
_COMMAND = "import sys; from anomaly.cli import main; sys.exit(main(sys.argv[1:]))"


def measure(data: Path, settings: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Train and evaluate once."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.yaml").write_text("data: {format: mvtec}\n")
        every = [
            f"data.root={data.absolute()}",
            "backbone.name=resnet50_v1",
            f"backbone.weights={args.weights.absolute()}",
            "model.coreset_ratio=0.01",
            *args.overrides,
            *settings,
        ]
        flags = [part for setting in every for part in ("--set", setting)]
        program: list[object] = [sys.executable, "-c", _COMMAND]
        config = ["--config", place / "config.yaml", *flags, "--output", place / "run"]
        trained = run([*program, "train", *config])
        figures = ["--model", place / "run", "--output", place / "figures"]
        tested = run([*program, "evaluate", *figures])
        if trained.failed or tested.failed:
            sys.exit(trained.failed or tested.failed)
        mean: dict[str, Any] = json.loads((place / "figures" / "metrics.json").read_text())["mean"]
    return {
        "image AUROC": mean["image_auroc"],
        "pixel AUROC": mean["pixel_auroc"],
        "train": trained.seconds,
        "evaluate": tested.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="ResNet-50, .safetensors")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="data sets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    print(machine() + "\n")
    print("| data set | image size | image AUROC | pixel AUROC | training | evaluation |")
    print("|---|---|---|---|---|---|")
    for data in args.data:
        for name in args.sizes:
            runs = [measure(data, [*SIZES[name], f"seed={seed}"], args) for seed in args.seeds]
            mean = {key: statistics.fmean(one[key] for one in runs) for key in runs[0]}
            scores = sorted(one["image AUROC"] for one in runs)
            print(
                f"| {data.name} | {name} | {mean['image AUROC']:.3f} ({scores[0]:.3f} to "
                f"{scores[-1]:.3f}) | {mean['pixel AUROC']:.3f} | {mean['train']:.1f} s "
                f"| {mean['evaluate']:.1f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
