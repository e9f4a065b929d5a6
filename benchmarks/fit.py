"""Training, from imports done to model saved, against anomalib; thresholds off on both sides.

    python -m benchmarks.fit --images bottle/train/good --weights FILE.safetensors \
        [--anomalib-python .venv-anomalib/bin/python]

The peer's environment: `python -m venv .venv-anomalib && .venv-anomalib/bin/pip install
anomalib==2.7.0`. Same images, network, weights, input size and batch size. Sides alternate; figures
are medians. Memory is that of the whole process tree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.inputs import machine
from benchmarks.process import Outcome, run

PEER = Path(__file__).with_name("anomalib_side.py")
MODELS = {
    "PatchCore 1 %": ["--kind", "patchcore", "--ratio", "0.01"],
    "PatchCore 10 %": ["--kind", "patchcore", "--ratio", "0.1"],
    "PaDiM 100": ["--kind", "padim", "--dimensions", "100"],
    "PaDiM 550": ["--kind", "padim", "--dimensions", "550"],
}


def measure(name: str, args: argparse.Namespace) -> None:
    """The lines of one model."""
    sides = [f"anomaly, {p}" for p in args.precisions]
    if args.anomalib_python and name in args.peer_models:
        sides.append("anomalib")
    outcomes: dict[str, list[Outcome]] = {who: [] for who in sides}
    for round_ in range(args.runs):
        for who in sides:
            if who != "anomalib" or round_ < args.peer_runs:
                outcomes[who].append(train(who, MODELS[name], args))
    peers = [o.result["seconds"] for o in outcomes.get("anomalib", []) if o.result]
    for who, several in outcomes.items():
        if any(o.failed for o in several):
            print(f"| {name} | {who} | failed: {several[0].failed[-120:]!r} | | | |", flush=True)
            continue
        seconds = statistics.median(o.result["seconds"] for o in several)
        peak = max(o.peak for o in several) / 1e9
        ratio = f"{statistics.median(peers) / seconds:.1f}×" if peers else ""
        size = several[0].result.get("model_bytes")
        shown = f"{size / 1e6:.0f} MB" if size else ""
        print(
            f"| {name} | {who} | {seconds:.1f} s | {ratio} | {peak:.2f} GB | {shown} |", flush=True
        )


def train(who: str, options: list[str], args: argparse.Namespace) -> Outcome:
    """One training by one side."""
    program: list[object] = [sys.executable, "-m", "benchmarks.our_side", "fit"]
    if who == "anomalib":
        program = [args.anomalib_python, PEER, "fit"]
    else:
        options = [*options, "--precision", who.split()[-1]]
    with tempfile.TemporaryDirectory() as folder:
        inputs = ["--images", args.images.absolute(), "--weights", args.weights.absolute()]
        places = ["--output", f"{folder}/out", "--checkpoint", f"{folder}/model"]
        return run([*program, *options, *inputs, *places, "--threads", args.threads])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="a folder of good images")
    parser.add_argument("--weights", type=Path, required=True, help="ResNet-50, .safetensors")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--anomalib-python", type=Path, help="an interpreter that has anomalib")
    parser.add_argument("--peer-models", nargs="+", default=["PatchCore 1 %", "PaDiM 100"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer-runs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(machine() + "\n")
    print("| model | side | fit | anomalib takes | peak memory | model |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        measure(name, args)


if __name__ == "__main__":
    main()
