"""Are regions as large as defects? Their widths and heights over those of ground-truth masks.

    python -m benchmarks.regions --weights FILE --data FOLDER... [--network resnet50_v1]
        [--set model.kind=padim]

Each folder is in MVTec AD layout. A region is compared with the part of the ground-truth mask that
it overlaps most; those that overlap none are counted as false. `threshold` marks what is above the
pixel threshold, `extent` is how regions are measured (docs/how/maps.md).
"""

from __future__ import annotations

import anomaly  # isort: skip  # noqa: F401, before torch, which reads once what it sets

import argparse
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly import fit
from anomaly.config.load import load_config
from anomaly.datasets import ground_truth, open_dataset
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.regions import marked_regions, predicted_mask
from benchmarks.inputs import machine

RULES = ("threshold", "extent")


def marked(found: SourceMap, threshold: float, rule: str) -> NDArray[np.uint8]:
    """The mask (H0, W0) that a rule predicts."""
    if rule == "extent":
        return predicted_mask(found, threshold)
    return np.where(found() > threshold, 255, 0).astype(np.uint8)


def compared(
    found: SourceMap, mask: NDArray[np.uint8], truth: NDArray[np.bool_]
) -> Iterator[tuple[float, float, bool, bool] | None]:
    """Each region's width and height over the defect's, and whether they are within a patch.

    None for a region that overlaps no defect.
    """
    _, defects, sizes, _ = cv2.connectedComponentsWithStats(truth.astype(np.uint8), connectivity=8)
    _, labels = cv2.connectedComponents(mask, connectivity=8)
    for region in marked_regions(mask, found):
        inside = labels == labels[region.peak_y, region.peak_x]
        overlaps = np.bincount(defects[inside], minlength=len(sizes))[1:]
        if not overlaps.any():
            yield None
            continue
        width, height = sizes[1 + overlaps.argmax(), 2:4].tolist()
        yield (
            region.width / width,
            region.height / height,
            abs(region.width - width) <= region.width_uncertainty,
            abs(region.height - height) <= region.height_uncertainty,
        )


def measure(data: Path, settings: list[str]) -> None:
    """Train on a data set, and print a line for each rule."""
    dataset = open_dataset("mvtec", data)
    detector = fit(dataset, load_config("folder.yaml", settings))
    assert detector.thresholds is not None
    defects = [sample for sample in dataset.test if sample.is_defect]
    rows: dict[str, list[tuple[float, float, bool, bool] | None]] = {rule: [] for rule in RULES}
    for sample in defects:
        found = detector.predict(sample.path).source_map.held()
        truth = ground_truth(sample, found.view.source)
        for rule in RULES:
            mask = marked(found, detector.thresholds.pixel, rule)
            rows[rule] += compared(found, mask, truth)
    for rule, every in rows.items():
        matched = np.array([row for row in every if row is not None]).reshape(-1, 4)
        cells = ["–"] * 4
        if len(matched):
            width, height = np.percentile(matched[:, :2], [50, 25, 75], axis=0).T
            cells = [f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in (width, height)]
            cells += [f"{share:.0%}" for share in matched[:, 2:].mean(0)]
        counts = map(str, (len(defects), len(matched), len(every) - len(matched)))
        print(f"| {data.name} | {rule} | " + " | ".join([*counts, *cells]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="as backbone.weights")
    parser.add_argument("--network", default="resnet50_v1", help="as backbone.name")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    print(machine() + "\n")
    print(
        "| data set | rule | defective images | regions | false | width ÷ true | height ÷ true "
        "| width within a patch | height within a patch |\n" + "|---" * 9 + "|"
    )
    settings = [f"backbone.name={args.network}", f"backbone.weights={args.weights.absolute()}"]
    for data in args.data:
        measure(data, [*settings, *args.overrides])


if __name__ == "__main__":
    main()
