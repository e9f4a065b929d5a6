"""From image files to heatmaps on disk, against anomalib.

    python -m benchmarks.infer --train bottle/train/good --images bottle/test \
        --weights FILE.safetensors [--anomalib-python .venv-anomalib/bin/python]

Both sides write PNG: ours in the image's own size, the peer's default panels of 256 px. Our time
includes loading the model, the peer's doesn't. Latency is that of a single image in a warm process,
from file to scores and anomaly map.

    python -m benchmarks.infer --stages RUN --images FOLDER

prints what each stage takes of a core instead, see `benchmarks.stages`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from anomaly.imaging.listing import list_images
from benchmarks.fit import MODELS, PEER
from benchmarks.inputs import machine
from benchmarks.process import run
from benchmarks.stages import show


def measure(who: str, name: str, args: argparse.Namespace) -> None:
    """Train with one side, then score with it."""
    program: list[object] = [sys.executable, "-m", "benchmarks.our_side"]
    options = list(MODELS[name])
    if who == "anomalib":
        program = [args.anomalib_python, PEER]
    else:
        options += ["--precision", who.split()[-1]]
    with tempfile.TemporaryDirectory() as folder:
        common = ["--weights", args.weights.absolute(), "--threads", args.threads]
        known = args.peer_checkpoint if who == "anomalib" else None
        places = ["--output", f"{folder}/out", "--checkpoint", known or f"{folder}/model"]
        made = None
        if known is None:
            made = run([*program, "fit", "--images", args.train, *options, *common, *places])
        used = run([*program, "infer", "--images", args.images, *options, *common, *places])
    if failed := (made.failed if made else "") or used.failed:
        print(f"| {name} | {who} | failed: {failed[-120:]!r} | | | |")
        return
    r = used.result
    print(
        f"| {name} | {who} | {r['images'] / r['seconds']:.1f} | {1000 * r['p50']:.0f} ms "
        f"| {1000 * r['p99']:.0f} ms | {used.peak / 1e9:.2f} GB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, help="a folder of good images")
    parser.add_argument("--images", type=Path, required=True, help="a folder to score")
    parser.add_argument("--weights", type=Path, help="ResNet-50, .safetensors")
    parser.add_argument("--stages", type=Path, metavar="RUN", help="of this model, nothing else")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:3])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--anomalib-python", type=Path, help="an interpreter that has anomalib")
    parser.add_argument(
        "--peer-checkpoint", type=Path, help="what the peer has trained before, of --peer-models"
    )
    parser.add_argument("--peer-models", nargs="+", default=["PatchCore 1 %"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(machine() + "\n")
    if args.stages:
        show(args.stages, list_images(args.images))
        return
    if not (args.train and args.weights):
        parser.error("--train and --weights are needed, or --stages")
    print("| model | side | images a second | p50 | p99 | peak memory |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        for precision in args.precisions:
            measure(f"anomaly, {precision}", name, args)
        if args.anomalib_python and name in args.peer_models:
            measure("anomalib", name, args)


if __name__ == "__main__":
    main()
