"""From image files to heatmaps on disk, against anomalib.

    python -m benchmarks.infer --train bottle/train/good --images bottle/test \
        --weights FILE.safetensors [--anomalib-python .venv-anomalib/bin/python]

*Whole* is the process from Enter to the prompt, in turns, the median; the peer predicts, and starts
and loads its model as ours does. Our network is ResNet-50, as the peer's, or one that comes by pip,
which is also measured as exported to ONNX. Both sides write PNG: ours at twice the network's size,
the peer's default panels of 256 px. *Images a second* is without start and imports; ours loads the
model, the peer doesn't. Latency is that of a single image in a warm process, from file to scores
and anomaly map.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from anomaly.runtime import cores
from benchmarks.fit import MODELS, PEER
from benchmarks.process import Outcome, machine, run

COMMAND: list[object] = [sys.executable, "-m", "anomaly"]
SMALL = "timm/tf_efficientnet_lite2"


@dataclass
class Side:
    """A trained model in one engine, and what was measured of it.

    Attributes:
        name: for the table.
        program: makes and uses the model, with the options of both sides.
        folder: of its model and its outputs.
        whole: the command that is timed as a whole; it takes images and an output.
        wholes: what that took.
        warm: seconds without the start, and latencies.
    """

    name: str
    program: list[object]
    folder: Path
    whole: list[object]
    wholes: list[Outcome] = field(default_factory=list)
    warm: Outcome | None = None

    @property
    def places(self) -> list[object]:
        """Where both tasks write."""
        return ["--output", self.folder / "out", "--checkpoint", self.folder / "model"]

    def fit(self, images: Path) -> None:
        """Train; exits where that fails."""
        done = run([*self.program, "fit", "--images", images, *self.places])
        if done.failed:
            raise SystemExit(f"{self.name}: {done.failed}")

    def row(self, peer: float | None) -> str:
        """Its line of the table, with ratios to the peer's whole command."""
        if failed := [o.failed for o in (*self.wholes, self.warm) if o and o.failed]:
            return f"| {self.name} | failed: {failed[0][-120:]!r} | | | | |"
        seconds = statistics.median(o.seconds for o in self.wholes)
        ratio = "" if peer is None else f" = {peer / seconds:.1f}×"
        cells = ["", "", ""]
        if self.warm:
            r = self.warm.result
            cells = [f"{r['images'] / r['seconds']:.1f}"]
            cells += [f"{1000 * r[p]:.0f} ms" for p in ("p50", "p99")]
        peak = max(o.peak for o in self.wholes) / 1e9
        return f"| {self.name} | {seconds:.1f} s{ratio} | {' | '.join(cells)} | {peak:.2f} GB |"


def sides(args: argparse.Namespace, place: Path) -> list[Side]:
    """All sides, trained; the peer last."""
    given = ["--weights", args.weights.absolute(), *MODELS[args.model]]
    ours: list[object] = [sys.executable, "-m", "benchmarks.our_side"]
    made = []
    for network, more in (
        ("ResNet-50", []),
        ("EfficientNet-Lite2", ["--backbone", SMALL, "--weights", "imagenet"]),
    ):
        for precision in args.precisions:
            name, folder = f"anomaly, {network}, {precision}", place / f"{network} {precision}"
            program = [*ours, *given, *more, "--precision", precision]
            infer = [*COMMAND, "infer", "--model", folder / "model"]
            made.append(Side(name, program, folder, [*infer, "--overwrite", "--input"]))
            made[-1].fit(args.train)
    small, exported = made[-1], place / "onnx"
    options = ["--model", small.folder / "model", "--to", "onnx", "--output", exported]
    options += ["--golden", args.images]
    if failed := run([*COMMAND, "export", *options]).failed:
        raise SystemExit(f"export: {failed}")
    infer = [*COMMAND, "infer", "--model", exported]
    name = "anomaly, EfficientNet-Lite2, ONNX Runtime"
    made.append(Side(name, [], exported, [*infer, "--overwrite", "--input"]))
    if args.anomalib_python:
        program = [args.anomalib_python, PEER]
        peer = Side("anomalib, ResNet-50, fp32", program, place / "anomalib", [])
        peer.program += ["--weights", args.weights.absolute(), "--threads", cores()]
        peer.program += MODELS[args.model]
        peer.folder.mkdir()
        peer.fit(args.train)
        peer.whole = [*peer.program, "infer", "--singles", 0, "--checkpoint"]
        peer.whole += [peer.folder / "model", "--images"]
        made.append(peer)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="a folder of good images")
    parser.add_argument("--images", type=Path, required=True, help="a folder to score")
    parser.add_argument("--weights", type=Path, required=True, help="ResNet-50, .safetensors")
    parser.add_argument("--model", choices=MODELS, default="PatchCore 1 %")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--anomalib-python", type=Path, help="an interpreter that has anomalib")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(machine() + "\n")
    images = args.images.absolute()
    with tempfile.TemporaryDirectory() as folder:
        made = sides(args, Path(folder))
        for _ in range(args.runs):
            for side in made:
                place = side.folder / "whole"
                side.wholes.append(run([*side.whole, images, "--output", place]))
        for side in made:
            if side.program:
                side.warm = run([*side.program, "infer", "--images", images, *side.places])
        peer = None
        if args.anomalib_python:
            peer = statistics.median(o.seconds for o in made[-1].wholes)
        print(f"| {args.model} | whole | images a second | p50 | p99 | peak memory |")
        print("|---|---|---|---|---|---|")
        for side in made:
            print(side.row(peer), flush=True)


if __name__ == "__main__":
    main()
