"""A defect among the training images is found there."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import Command, train_arguments, write_part, write_product

from anomaly.scorers.base import PatchBatch
from anomaly.scorers.memory_bank import MemoryBankFitter
from anomaly.suspects import COUNT, _against_others, _outstanding


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
@pytest.mark.parametrize("tiles", ["null", "64"])
def test_a_planted_defect_is_among_the_three_most_suspicious(
    kind: str, tiles: str, tmp_path: Path, command: Command
) -> None:
    if (kind, tiles) == ("padim", "64"):
        pytest.skip("PaDiM has no tiles")
    product = write_product(tmp_path / "disc")
    write_part(product / "train" / "good" / "005.png", seed=5, mark=(40, 60))
    output = tmp_path / "run"
    arguments = train_arguments(product, output, f"model.kind={kind}", f"image.tile={tiles}")
    code, out, _ = command("train", arguments)
    assert code == 0
    listed = json.loads((output / "train.json").read_text())["suspects"]
    assert len(listed) == COUNT
    assert "train/good/005.png" in [s["name"] for s in listed[:3]]
    assert [s["score"] for s in listed] == sorted((s["score"] for s in listed), reverse=True)
    assert "train/good/005.png" in out
    for suspect in listed:
        picture = cv2.imread(str(output / suspect["heatmap"]))
        assert picture.shape == (96, 120, 3)


class _Patches:
    """What `find_suspects` reads of the training patches."""

    def __init__(self, embeddings: torch.Tensor) -> None:
        from anomaly.geometry import Sizing

        self.embeddings = embeddings
        self.views = dict.fromkeys(range(len(embeddings)), Sizing(64, None, 64, 8).view((64, 64)))

    def __iter__(self):
        for i, image in enumerate(self.embeddings):
            yield PatchBatch(image[None], (i,))

    def only(self, images):
        return [batch for batch in self if batch.images[0] in images]


def test_scores_are_distances_to_the_other_images_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(9, 6, 6, 20, generator=generator)
    embeddings[4, 2, 3] += 6
    patches = _Patches(embeddings)
    bank = MemoryBankFitter(0.3).fit(patches)
    assert _outstanding(bank)[0] == 4
    suspect = _against_others(bank, patches, 4)
    others = bank.vectors[bank.origins[:, 0] != 4].numpy()
    assert len(others) < len(bank.vectors)
    flat = embeddings[4].reshape(-1, 20).numpy()
    expected = np.linalg.norm(flat[:, None] - others[None], axis=2).min(1).reshape(6, 6)
    np.testing.assert_allclose(suspect.patch_scores, expected, rtol=1e-4)
    assert suspect.score == pytest.approx(expected[2, 3], rel=1e-4)
