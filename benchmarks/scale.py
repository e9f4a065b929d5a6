"""Training on more and more images: seconds and peak memory, and how near the coreset comes.

python -m benchmarks.scale --weights FILE.safetensors [--counts 500 2000 5000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

from benchmarks.inputs import machine
from benchmarks.process import run


def generate(folder: Path, count: int) -> None:
    """Images of one textured part in ever other places and light."""
    folder.mkdir()
    for i in range(count):
        rng = np.random.default_rng(i)
        noise = rng.normal(128, 40, (64, 64, 3)).astype(np.float32)
        image = cv2.resize(noise, (256, 256), interpolation=cv2.INTER_CUBIC)
        centre = tuple(int(v) for v in rng.integers(112, 144, 2))
        cv2.circle(image, centre, 80, (180.0 + rng.normal(0, 8), 150.0, 90.0), -1, cv2.LINE_AA)
        image += rng.normal(0, 6, image.shape)
        cv2.imwrite(str(folder / f"{i:05d}.png"), np.clip(image, 0, 255).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="ResNet-50, .safetensors")
    parser.add_argument("--counts", type=int, nargs="+", default=[500, 2000, 5000])
    parser.add_argument("--limits", type=int, nargs="+", default=[256, 16_000], help="MiB")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(machine() + "\n")
    print("| images | memory_limit | fit | peak memory | covering radius | exact |")
    print("|---|---|---|---|---|---|")
    for count in args.counts:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder) / "good", count)
            for limit in args.limits:
                command: list[object] = [sys.executable, "-m", "benchmarks.our_side", "fit"]
                command += ["--images", f"{folder}/good", "--weights", args.weights.absolute()]
                command += ["--output", f"{folder}/out", "--checkpoint", f"{folder}/model"]
                command += ["--memory-limit", limit, "--threads", args.threads]
                outcome = run(command)
                r = outcome.result
                if outcome.failed:
                    print(f"| {count} | {limit} MiB | failed: {outcome.failed[-120:]!r} | | | |")
                    continue
                print(
                    f"| {count} | {limit} MiB | {r['seconds']:.0f} s | {outcome.peak / 1e9:.2f} GB "
                    f"| {r['covering_radius']:.3f} | {r['exact']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
