"""The infer command on one image, whole process, against importing torch and a first forward pass.

python -m benchmarks.cold_start --model RUN --image FILE
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.inputs import machine
from benchmarks.process import run

SCRIPT = Path(__file__).parents[1] / "scripts" / "infer.py"
FLOOR = """
import torch, torchvision
torch.set_num_threads({threads})
network = torchvision.models.resnet50(weights=None).eval()
stages = torch.nn.Sequential(*list(network.children())[:7])
with torch.inference_mode():
    stages(torch.zeros(1, 3, 256, 256))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a trained ResNet-50 run")
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    ours, floors = [], []
    for _ in range(args.runs):
        floors.append(run([sys.executable, "-c", FLOOR.format(threads=args.threads)]).seconds)
        with tempfile.TemporaryDirectory() as folder:
            command: list[object] = [sys.executable, SCRIPT, "--model", args.model]
            command += ["--input", args.image, "--output", folder, "--threads", args.threads]
            outcome = run(command)
            if outcome.failed:
                raise SystemExit(outcome.failed)
            ours.append(outcome.seconds)
    a, b = statistics.median(ours), statistics.median(floors)
    print(machine() + "\n")
    print("| infer, one image | import torch, torchvision and a forward pass | ratio |")
    print("|---|---|---|")
    print(f"| {a:.2f} s | {b:.2f} s | {a / b:.2f}× |")


if __name__ == "__main__":
    main()
