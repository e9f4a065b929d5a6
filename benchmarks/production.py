"""Do thresholds fit production? Other lots than the one that was learned, and `--production`.

    python -m benchmarks.production --scores FOLDER [--data FOLDER…] [--weights FILE.safetensors]

Each set of photographs (train/good, test/good, test/<defect>) is learned twice: all of its training
images, judged by the test split; and the first half of them by name, judged by the second half and
by the test split. Scores are kept in the folder as NAME.npz, and read where they are there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import anomaly
from anomaly.calibration import GoodScores, Thresholds, thresholds_from
from anomaly.calibration.production import LEAST_IMAGES, compare_flagged, thresholds_from_production
from benchmarks.inputs import machine

Scores = NDArray[np.float64]
RATES = 0.05, 0.01
BOUND = 0.05
SHARES = 0.0, 0.02, 0.05
IMAGES = 100
FIRST = 50  # images after which a difference is to be said


def compute(root: Path, weights: Path | None) -> dict[str, Scores]:
    """Image scores by model (`all`, `half`) and images (`held`, `late`, `good`, `defects`)."""
    train = sorted((root / "train" / "good").iterdir())
    folders = sorted((root / "test").iterdir())
    images = {
        "good": [file for f in folders if f.name == "good" for file in sorted(f.iterdir())],
        "defects": [file for f in folders if f.name != "good" for file in sorted(f.iterdir())],
    }
    named = {"name": "resnet50_v1", "weights": str(weights)}
    network = named if weights else {"name": "timm/tf_efficientnet_lite2"}
    found: dict[str, Scores] = {}
    for key, lot in (("all", train), ("half", train[: len(train) // 2])):
        detector = anomaly.fit(lot, {"backbone": network, "model": {"coreset_ratio": 0.02}})
        assert detector.thresholds is not None
        found[f"{key}_held"] = np.array(detector.thresholds.good.image)
        late = {"late": train[len(lot) :]} if key == "half" else {}
        for what, files in (late | images).items():
            found[f"{key}_{what}"] = np.array([p.score for p in detector.stream(files)])
    return found


def good_scores(scores: Scores, prefix: str) -> GoodScores:
    values = tuple(scores.tolist())
    return GoodScores(tuple(f"{prefix}{i}" for i in range(len(values))), values, values, prefix)


def lots(scores: dict[str, Scores]) -> Iterator[tuple[str, str, Scores]]:
    """Model, name of the lot, and scores of its good images."""
    yield "all", "test split", scores["all_good"]
    yield "half", "second half", scores["half_late"]
    yield "half", "test split", scores["half_good"]


def said(thresholds: Thresholds, lot: Scores, rng: np.random.Generator) -> float:
    """In which share of random orders a difference is said after at most `FIRST` images."""
    promised = thresholds.calibration.review.false_rejects
    hits = 0
    for _ in range(200):
        flagged = (rng.permutation(lot)[:FIRST] > thresholds.review).cumsum()
        hits += any(
            compare_flagged(int(flagged[n - 1]), n, promised) != "as promised"
            for n in range(LEAST_IMAGES, len(flagged) + 1)
        )
    return hits / 200


def lot_rows(name: str, scores: dict[str, Scores]) -> Iterator[str]:
    rng = np.random.default_rng(0)
    for model, lot_name, lot in lots(scores):
        held = scores[f"{model}_held"]
        before = thresholds_from(good_scores(held, "known"), *RATES)
        promised = before.calibration.review.false_rejects
        above = float((lot[:, None] > held).mean())
        shown = f"{said(before, lot, rng):.0%}" if len(lot) >= LEAST_IMAGES else "too few"
        shares = [f"{(lot > threshold).mean():.1%}" for threshold in (before.review, before.image)]
        yield (
            f"| {name} | {len(held)} | {lot_name}, {len(lot)} | {above:.2f} "
            f"| {promised.expected:.1%} ({promised.at_most:.1%}) | {shares[0]} | {shares[1]} "
            f"| {shown} |"
        )


def production_rows(name: str, scores: dict[str, Scores], repeats: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    for model in ("all", "half"):
        held = good_scores(scores[f"{model}_held"], "known")
        before = thresholds_from(held, *RATES)
        mixed = [s for m, _, s in lots(scores) if m == model]
        good, defects = np.concatenate(mixed), scores[f"{model}_defects"]
        images = min(IMAGES, len(good) * 2 // 3)
        if images * BOUND < 1:
            continue
        cells, spreads = [], []
        for share in SHARES:
            bad = round(share * images)
            shown, caught = [], []
            for _ in range(repeats):
                order, worse = rng.permutation(good), rng.permutation(defects)
                seen = np.append(order[: images - bad], worse[:bad])
                after = thresholds_from_production(held, good_scores(seen, ""), BOUND, *RATES)
                shown.append((order[images - bad :] > after.thresholds.review).mean())
                caught.append((worse[bad:] > after.thresholds.review).mean())
            cells.append(f"{np.mean(shown):.1%}, {np.mean(caught):.0%}")
            spreads.append(np.std(shown))
        first = f"{(good > before.review).mean():.1%}, {(defects > before.review).mean():.0%}"
        yield (
            f"| {name} | {len(held.image)} | {images} of {len(good)} | {first} "
            f"| {' | '.join(cells)} | {np.mean(spreads):.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scores", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--weights", type=Path, help="of resnet50_v1 (default: the installed one)")
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    print(machine(), flush=True)
    args.scores.mkdir(parents=True, exist_ok=True)
    for root in args.data:
        file = args.scores / f"{root.name}.npz"
        if not file.exists():
            np.savez(file, allow_pickle=False, **compute(root, args.weights))
    sets = {file.stem: dict(np.load(file)) for file in sorted(args.scores.glob("*.npz"))}
    print("\n| set | learned | lot | above | promised | flagged | rejected | said |")
    print("|---" * 8 + "|")
    for name, scores in sets.items():
        print("\n".join(lot_rows(name, scores)), flush=True)
    shares = " | ".join(f"{share:.0%} defective" for share in SHARES)
    print(f"\n| set | learned | production images | before | {shares} | spread |")
    print("|---" * (5 + len(SHARES)) + "|")
    for name, scores in sets.items():
        for row in production_rows(name, scores, args.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
