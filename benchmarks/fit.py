"""Training: from imports done to model saved and as a whole command, against anomalib.

    python -m benchmarks.fit --images bottle/train/good --weights FILE.safetensors \
        [--anomalib-python .venv-anomalib/bin/python]

The peer's environment: `python -m venv .venv-anomalib && .venv-anomalib/bin/pip install
anomalib==2.7.0`. Same images, network, weights, input size and batch size. Fit finds thresholds on
neither side; our whole command is `anomaly train` as users run it, thresholds included, and the
peer's its process, which finds none. Sides alternate; figures are medians. Memory is that of the
whole process tree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import yaml

from anomaly.runtime import cores
from benchmarks.process import Outcome, machine, run

PEER = Path(__file__).with_name("anomalib_side.py")
SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
MODELS = {
    "PatchCore 1 %": ["--kind", "patchcore", "--ratio", "0.01"],
    "PatchCore 10 %": ["--kind", "patchcore", "--ratio", "0.1"],
    "PaDiM 100": ["--kind", "padim", "--dimensions", "100"],
}


def measure(name: str, args: argparse.Namespace) -> None:
    """The lines of one model."""
    sides = [f"anomaly, {p}" for p in args.precisions]
    if args.anomalib_python and name in args.peer_models:
        sides.append("anomalib")
    fits: dict[str, list[Outcome]] = {who: [] for who in sides}
    commands: dict[str, list[Outcome]] = {who: [] for who in sides}
    for round_ in range(args.runs):
        for who in sides:
            if who == "anomalib":
                if round_ < args.peer_runs:
                    fits[who].append(fit(who, MODELS[name], args))
            else:
                fits[who].append(fit(who, MODELS[name], args))
                commands[who].append(train(who, MODELS[name], args))
    commands["anomalib"] = fits.get("anomalib", [])
    peer = [statistics.median(side) for side in _seconds(fits, commands, "anomalib") if side]
    for who in sides:
        if failed := [o.failed for o in fits[who] + commands[who] if o.failed]:
            print(f"| {name} | {who} | failed: {failed[0][-120:]!r} | | | | | |", flush=True)
            continue
        times = [statistics.median(side) for side in _seconds(fits, commands, who)]
        ratios = [f"{p / t:.1f}×" for p, t in zip(peer, times, strict=True)] if peer else ["", ""]
        peak = max(o.peak for o in fits[who] + commands[who]) / 1e9
        size = fits[who][0].result.get("model_bytes")
        shown = f"{size / 1e6:.0f} MB" if size else ""
        print(
            f"| {name} | {who} | {times[0]:.1f} s | {ratios[0]} | {times[1]:.1f} s | {ratios[1]} "
            f"| {peak:.2f} GB | {shown} |",
            flush=True,
        )


def _seconds(
    fits: dict[str, list[Outcome]], commands: dict[str, list[Outcome]], who: str
) -> tuple[list[float], list[float]]:
    """How long one side's fits took, and its whole commands."""
    fitted = [o.result["seconds"] for o in fits.get(who, []) if o.result]
    return fitted, [o.seconds for o in commands[who] if not o.failed]


def fit(who: str, options: list[str], args: argparse.Namespace) -> Outcome:
    """One fit by one side."""
    program: list[object] = [sys.executable, "-m", "benchmarks.our_side", "fit"]
    if who == "anomalib":
        program = [args.anomalib_python, PEER, "fit", "--threads", cores()]
    else:
        options = [*options, "--precision", who.split()[-1]]
    with tempfile.TemporaryDirectory() as folder:
        inputs = ["--images", args.images.absolute(), "--weights", args.weights.absolute()]
        places = ["--output", f"{folder}/out", "--checkpoint", f"{folder}/model"]
        return run([*program, *options, *inputs, *places])


def train(who: str, options: list[str], args: argparse.Namespace) -> Outcome:
    """One run of our whole command, with thresholds."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    settings = {
        "data": {"format": "folder", "root": str(args.images.absolute())},
        "image": {"resize": 256},
        "backbone": {"name": "resnet50_v1", "weights": str(args.weights.absolute())},
        "model": {
            "kind": given["--kind"],
            "coreset_ratio": float(given.get("--ratio", 0.01)),
            "dimensions": int(given.get("--dimensions", 100)),
        },
        "precision": who.split()[-1],
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(yaml.safe_dump(settings))
        places = ["--config", config, "--output", f"{folder}/run"]
        return run([sys.executable, SCRIPT, *places])


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
    args = parser.parse_args()
    print(machine() + "\n")
    print(
        "| model | side | fit | anomalib takes | whole command | anomalib takes | peak memory "
        "| model |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in args.models:
        measure(name, args)


if __name__ == "__main__":
    main()
