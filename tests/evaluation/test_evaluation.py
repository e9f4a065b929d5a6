"""Evaluation against scikit-learn on the same scores, and what the tables say of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import write_product
from sklearn.metrics import average_precision_score, roc_auc_score

from anomaly.datasets.layouts import open_dataset
from anomaly.datasets.samples import Sample
from anomaly.desk.change import Compared
from anomaly.evaluation.evaluate import Evaluation, score_test_split, width_of
from anomaly.evaluation.metrics import Metrics
from anomaly.imaging.read import read_mask
from anomaly.report.report import metrics_json, table
from anomaly.scoring.model import Prediction, Scored
from anomaly.storage.models import load_model


def test_figures_agree_with_scikit_learn(run_folder: Path, product: Path) -> None:
    samples = open_dataset("mvtec", product).test
    labels, scores, pixels, truth = [], [], [], []

    def visit(prediction: Prediction, _: object) -> None:
        sample, pixel_scores = samples[prediction.index], prediction.anomaly_map
        labels.append(sample.is_defect)
        scores.append(prediction.score)
        pixels.append(pixel_scores.ravel())
        mask = read_mask(sample.mask_path) if sample.mask_path else np.zeros(pixel_scores.shape)
        truth.append(mask.ravel() > 0)

    values = score_test_split(load_model(run_folder, "cpu"), samples, visit=visit).metrics.values
    assert values["image_auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-9)
    assert values["image_ap"] == pytest.approx(average_precision_score(labels, scores), abs=1e-9)
    flat, marked = np.concatenate(pixels), np.concatenate(truth)
    assert values["pixel_auroc"] == pytest.approx(roc_auc_score(marked, flat), abs=1e-5)
    assert values["pixel_ap"] == pytest.approx(average_precision_score(marked, flat), abs=1e-5)


@pytest.fixture
def disc(tmp_path: Path) -> Path:
    return write_product(tmp_path / "disc", n_train=1)


def evaluated(run: Path, product: Path, **options: Any) -> Evaluation:
    """The evaluation of a run's model on the test split of a product."""
    return score_test_split(load_model(run, "cpu"), open_dataset("mvtec", product).test, **options)


def test_an_image_that_cannot_be_read_or_whose_mask_cannot_is_left_out_and_listed(
    run_folder: Path, disc: Path
) -> None:
    mask = disc / "ground_truth" / "spot" / "001_mask.png"
    mask.write_bytes(mask.read_bytes()[:-30])
    (disc / "test" / "good" / "001.png").write_text("no image")
    seen: list[str] = []
    evaluation = evaluated(run_folder, disc, visit=lambda p, mask: seen.append(p.name))
    no_image, no_mask = (row for row in evaluation.scored if row.score is None)
    assert (no_image.sample.name, no_mask.sample.name) == ("test/good/001.png", "test/spot/001.png")
    assert "001.png" in no_image.reason
    assert "001.png is left out, because its mask can't be used: " in no_mask.reason
    assert "001_mask.png: " in no_mask.reason
    assert (evaluation.n_good, evaluation.n_defect, len(seen)) == (2, 2, 4)
    assert evaluation.metrics.values["pixel_auroc"] is not None


def test_defects_without_masks_count_for_the_image_only(
    run_folder: Path, disc: Path, caplog: pytest.LogCaptureFixture
) -> None:
    masks = disc / "ground_truth" / "spot"
    (masks / "000_mask.png").unlink()
    expected = evaluated(run_folder, disc).metrics
    # A mask that marks nothing makes no good image either.
    cv2.imwrite(str(masks / "000_mask.png"), np.zeros((96, 120), np.uint8))
    assert evaluated(run_folder, disc).metrics == expected
    nothing = f"1 of 3 defects have no mask, or one that marks nothing ({disc / 'test' / 'spot'}"
    assert caplog.text.count(nothing) == 2
    shutil.rmtree(disc / "ground_truth")
    without = evaluated(run_folder, disc).metrics
    assert without.values["image_auroc"] == 1.0
    assert without.values["pixel_auroc"] is None
    assert without.reasons["pixel_auroc"]


def _evaluation(name: str, auroc: float | None) -> Evaluation:
    sample = Sample(Path("/x/odd, name.png"), "odd, name.png", "scratch")
    reasons = {} if auroc is not None else {"image_auroc": "no good images"}
    metrics = Metrics({"image_auroc": auroc}, reasons)
    return Evaluation(name, (Scored(sample, 1.5),), metrics)


def test_the_mean_leaves_undefined_figures_out() -> None:
    evaluations = [_evaluation("a", 0.5), _evaluation("b", 0.9), _evaluation("c", None)]
    written = json.loads(metrics_json(evaluations))
    assert written["mean"] == {"image_auroc": pytest.approx(0.7)}
    assert written["categories"]["c"]["image_auroc"] is None
    assert written["categories"]["c"]["undefined"] == {
        "image_auroc": "no good images",
        "verdicts": "the model has no thresholds",
    }
    assert written["categories"]["a"]["n_defect"] == 1
    shown = table(evaluations).splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["a", "b", "c", "mean"]
    assert json.loads(metrics_json([_evaluation("c", None)]))["mean"] == {"image_auroc": None}


def test_what_was_caught_and_would_pass_escapes() -> None:
    every = [(a, b) for a in ("good", "review", "reject") for b in ("good", "review", "reject")]
    part = Sample(Path("a.png"), "a.png")
    escapes = [pair for pair in every if Compared(part, *pair, (1.0, 2.0)).newly_passes]
    assert escapes == [("review", "good"), ("reject", "good")]


def test_the_width_of_a_defect() -> None:
    mask = np.zeros((60, 80), bool)
    mask[10:20, 5:70] = True  # ten pixels high
    assert width_of(mask) == pytest.approx(10, abs=0.5)
