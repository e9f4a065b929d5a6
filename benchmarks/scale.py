"""More and more images: training, and the process that shares a job out among workers.

python -m benchmarks.scale --weights FILE.safetensors [--counts 500 2000 5000]
python -m benchmarks.scale --weights FILE.safetensors --counts 1000 10000 100000 --side 64
                           --vectors 2000 --limits 256
python -m benchmarks.scale --lines 10000 10000000
python -m benchmarks.scale --overhead runs/my_part /path/to/images

The first trains: seconds and peak memory, and how near the coreset comes. The second does so with
small images and a bank of one size, so that a hundred thousand take minutes. The third lists
images that don't exist, and has workers that do nothing finish all chunks but those of every other
part, which is there already: the memory of `manifest`, and of `infer --ray` beside its workers.
The fourth scores images in one process with two threads, and with two workers of one: seconds of
all, images a second from the first part on (without what starting takes), and processor time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from benchmarks.process import run


def generate(folder: Path, count: int, side: int) -> None:
    """Images of one textured part in ever other places and light."""
    import cv2
    import numpy as np

    folder.mkdir()
    for i in range(count):
        rng = np.random.default_rng(i)
        noise = rng.normal(128, 40, (side // 4, side // 4, 3)).astype(np.float32)
        image = cv2.resize(noise, (side, side), interpolation=cv2.INTER_CUBIC)
        centre = tuple(int(v) for v in rng.integers(side * 7 // 16, side * 9 // 16, 2))
        cv2.circle(
            image, centre, side * 5 // 16, (180.0 + rng.normal(0, 8), 150.0, 90.0), -1, cv2.LINE_AA
        )
        image += rng.normal(0, 6, image.shape)
        cv2.imwrite(str(folder / f"{i:06d}.png"), np.clip(image, 0, 255).astype(np.uint8))


def list_images(folder: Path, lines: int) -> None:
    """A manifest of so many names, and a part for every other chunk."""
    from anomaly.datasets.image_manifest import write_manifest

    names = (f"s3://archive/line-{i % 40:02}/2026/{i:010}.png" for i in range(lines))
    write_manifest(names, str(folder / "m.parquet"))
    (folder / "out" / "results.parts").mkdir(parents=True)
    for chunk in range(0, -(-lines // 1000), 2):
        (folder / "out" / "results.parts" / f"{chunk:09}.parquet").touch()


def share_out(folder: Path) -> None:
    """What `infer --ray --resume` does beside its workers."""
    from anomaly.cluster.actors import Work, dispatch
    from anomaly.cluster.parts import begin_job, chunks_done
    from anomaly.datasets.image_manifest import read_manifest

    manifest, dest = read_manifest(str(folder / "m.parquet")), str(folder / "out")
    begin_job(str(folder / "job"), {"list of images": manifest.id})
    done = chunks_done(dest)
    left = (chunk for chunk in range(len(manifest.sizes)) if chunk not in done)
    work = Work(_Idler, _Idler.score, _Idler.probe, lambda chunk, counts: None)
    dispatch(left, manifest.sizes, work, lambda: 64)


class _Idler:
    """A worker that has always finished."""

    def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
        told: Future[Counter[str]] = Future()
        told.set_result(Counter(ok=1000, good=1000))
        return told

    probe = score

    def stop(self) -> None:
        pass


def memory(lines: Sequence[int]) -> None:
    """Peak memory of both, each in a process of its own."""
    print("| lines | manifest | its peak memory | sharing out | its peak memory |")
    print("|---|---|---|---|---|")
    for count in lines:
        cells = []
        with tempfile.TemporaryDirectory() as folder:
            for call in (f"list_images(Path({folder!r}), {count})", f"share_out(Path({folder!r}))"):
                code = f"from pathlib import Path; from benchmarks.scale import *; {call}"
                outcome = run([sys.executable, "-c", code])
                failed = outcome.failed and f"failed: {outcome.failed[-120:]!r}"
                cells += [failed or f"{outcome.seconds:.1f} s", f"{outcome.peak / 1e6:.0f} MB"]
        print(f"| {count:,} | {' | '.join(cells)} |", flush=True)


def overhead(model: Path, images: Path) -> None:
    """The same job in one process and in two workers, each twice, in turn."""
    ways = {"one process": ["--threads", 2], "two workers": ["--ray", "local", "--workers", 2]}
    print("| | all | from the first part on | processor time |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        anomaly = [sys.executable, "-m", "anomaly"]
        manifest = Path(folder) / "m.parquet"
        run([*anomaly, "manifest", "--input", images, "--chunk", 16, "--output", manifest])
        for turn in range(2):
            for name, more in ways.items():
                output = Path(folder) / f"{name} {turn}"
                job = ["--model", model, "--manifest", manifest, "--output", output]
                outcome = run([*anomaly, "infer", *job, "--device", "cpu", *more])
                parts = sorted(f.stat().st_mtime for f in output.glob("results.parts/*"))
                if outcome.failed:
                    print(f"| {name} | failed: {outcome.failed[-120:]!r} | | |", flush=True)
                    continue
                rate = 16 * (len(parts) - 1) / (parts[-1] - parts[0])
                cells = f"{outcome.seconds:.0f} s | {rate:.1f} a second | {outcome.cpu:.0f} s"
                print(f"| {name} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, help="ResNet-50, .safetensors")
    parser.add_argument(
        "--overhead",
        type=Path,
        nargs=2,
        metavar=("MODEL", "IMAGES"),
        help="infer with and without --ray, on two cores",
    )
    parser.add_argument("--lines", type=int, nargs="+", help="of manifests to share out")
    parser.add_argument("--counts", type=int, nargs="+", default=[500, 2000, 5000])
    parser.add_argument("--limits", type=int, nargs="+", default=[256, 16_000], help="MiB")
    parser.add_argument("--side", type=int, default=256, help="of the images, in pixels")
    parser.add_argument("--vectors", type=int, help="of the bank (default: 1 %% of the patches)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    from benchmarks.inputs import machine  # torch would be in the others' memory

    print(machine() + "\n")
    if args.overhead:
        overhead(*args.overhead)
        return
    if args.lines:
        memory(args.lines)
        return
    if args.weights is None:
        parser.error("give --weights, --lines or --overhead")
    print("| images | limit | fit | an image | features | memory | covering radius | exact |")
    print("|---|---|---|---|---|---|---|---|")
    for count in args.counts:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder) / "good", count, args.side)
            for limit in args.limits:
                command: list[object] = [sys.executable, "-m", "benchmarks.our_side", "fit"]
                command += ["--images", f"{folder}/good", "--weights", args.weights.absolute()]
                command += ["--output", f"{folder}/out", "--checkpoint", f"{folder}/model"]
                command += ["--memory-limit", limit, "--threads", args.threads]
                command += ["--size", args.side]
                command += ["--vectors", args.vectors] if args.vectors else []
                outcome = run(command)
                r = outcome.result
                if outcome.failed:
                    print(
                        f"| {count} | {limit} MiB | failed: {outcome.failed[-120:]!r} | | | | | |"
                    )
                    continue
                print(
                    f"| {count} | {limit} MiB | {r['seconds']:.0f} s "
                    f"| {1000 * r['seconds'] / count:.1f} ms | {r['stages']['features']:.0f} s "
                    f"| {outcome.peak / 1e9:.2f} GB "
                    f"| {r['covering_radius']:.3f} | {r['exact']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
