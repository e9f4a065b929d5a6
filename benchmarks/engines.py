"""The infer command with one model in several engines: torch, and what it was exported for.

    python -m benchmarks.engines --model RUN --exports EXPORT [EXPORT ...] --images FOLDER

Every figure is of whole processes, file to heatmap on disk, in turns, so that whatever else the
machine does meets all engines. An image's time is that of all images less that of one alone.
Scores and verdicts are compared with torch's in fp32; those that differ are listed, and an image
in a folder `good` is taken for a good one. The size is that of all packages which the
engine's extra installs, as they lie on disk here.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from anomaly.storage.exported import read_export
from anomaly.storage.folder import find_model
from benchmarks.inputs import machine
from benchmarks.process import run

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts" / "infer.py"
ALONE = 2  # measures of one image alone, for each of all images


def installed_bytes(extra: str) -> int:
    """What pip installs for the package with an extra, as it lies here, but for compiled files."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    waiting = [*project["dependencies"], *project["optional-dependencies"][extra]]
    found: dict[str, int] = {}
    while waiting:
        requirement = Requirement(waiting.pop())
        name = requirement.name.lower().replace("_", "-")
        extras = ["", *requirement.extras]
        if name in found or not _applies(requirement, [""]):
            continue
        package = distribution(name)
        files = [Path(package.locate_file(f)) for f in package.files or () if f.suffix != ".pyc"]
        found[name] = sum(file.stat().st_size for file in files if file.is_file())
        wanted = map(Requirement, package.requires or ())
        waiting += [str(r).partition(";")[0] for r in wanted if _applies(r, extras)]
    return sum(found.values())


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


@dataclass
class Side:
    """One engine, and what was measured of it."""

    name: str
    extra: str
    options: list[object]
    alone: list[tuple[float, float]] = field(default_factory=list)
    all: list[tuple[float, float]] = field(default_factory=list)
    peak: int = 0
    rows: dict[str, tuple[float, str]] = field(default_factory=dict)

    def infer(self, inputs: list[Path], threads: int) -> tuple[float, float]:
        """Seconds, and seconds of processor time, of one command."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, SCRIPT, *self.options, "--input", *inputs]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = run([*command, "--output", folder, "--no-page", "--threads", threads])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.failed:
                raise SystemExit(f"{self.name}: {done.failed}")
            with (Path(folder) / "results.csv").open(encoding="utf-8-sig") as file:
                for row in csv.DictReader(file):
                    self.rows[row["path"]] = float(row["image_score"]), row["verdict"]
        self.peak = max(self.peak, done.peak)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return done.seconds, used

    def line(self, count: int, reference: Side) -> str:
        """Its line of the table, for `count` images."""
        alone, all_ = ([statistics.median(x) for x in zip(*t, strict=True)] for t in
                       (self.alone, self.all))  # fmt: skip
        wall, used = (1000 * (b - a) / (count - 1) for a, b in zip(alone, all_, strict=True))
        known = reference.rows
        share = max(abs(s - known[p][0]) / known[p][0] for p, (s, _) in self.rows.items())
        size = f"{installed_bytes(self.extra) / 1e6:.0f} MB"
        flips = sum(v != known[p][1] for p, (_, v) in self.rows.items())
        return (
            f"| {self.name} | {size} | {wall:.0f} ms | {used:.0f} ms | {alone[0]:.1f} s "
            f"| {alone[1]:.1f} s | {self.peak / 1e6:.0f} MB | {share:.1g} "
            f"| {flips} of {len(self.rows)} |"
        )

    def findings(self, reference: Side) -> Iterator[str]:
        """How well it tells good from defective, and the verdicts that aren't the reference's."""
        scores = {p: s for p, (s, _) in self.rows.items()}
        good = [s for p, s in scores.items() if Path(p).parent.name == "good"]
        defects = [s for p, s in scores.items() if Path(p).parent.name != "good"]
        if good and defects:
            higher = [(d > g) + (d == g) / 2 for d in defects for g in good]
            yield f"{self.name}: image AUROC {statistics.mean(higher):.4f}"
        for path, (score, verdict) in sorted(self.rows.items()):
            old, before = reference.rows[path]
            if verdict != before:
                yield f"{self.name}: {path} {before} ({old:.4g}) -> {verdict} ({score:.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a trained run")
    parser.add_argument("--exports", type=Path, nargs="*", default=[], help="exports of it")
    parser.add_argument("--images", type=Path, required=True, help="a folder to score")
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"], help="of torch")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    sides = [
        Side(f"torch {p}", "train", ["--model", args.model, "--device", "cpu", "--precision", p])
        for p in args.precisions
    ]
    for folder in args.exports:
        said = read_export(find_model(folder))
        assert said is not None, f"{folder} is no export"
        name = f"{said['engine']} {said['engine_version']} {said['precision']}"
        sides.append(Side(name, said["engine"], ["--model", folder]))
    first = min(path for path in args.images.rglob("*.png"))
    count = len(list(args.images.rglob("*.png")))
    print(f"{machine()}, {count} images\n", flush=True)
    for _ in range(args.runs):
        for side in sides:
            side.alone += [side.infer([first], args.threads) for _ in range(ALONE)]
            side.all.append(side.infer([args.images], args.threads))
    print("| engine | installed | an image | its processor time | cold start | its processor "
          "time | memory | largest score difference | verdicts changed |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for side in sides:
        print(side.line(count, sides[0]))
    print("", *(line for side in sides for line in side.findings(sides[0])), sep="\n")
    config = json.loads((find_model(args.model) / "manifest.json").read_text())["backbone"]["name"]
    print(f"\n{config}, {args.threads} threads")


if __name__ == "__main__":
    main()
