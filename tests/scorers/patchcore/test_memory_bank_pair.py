"""Two banks of tensors: fitting, leaving out, learning more, scores, saving.

References are single banks, fitted on patches that plain loops have seen as each level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_patches import (
    COARSE,
    FINE,
    coarse_batches,
    coarse_of,
    fine_batches,
    halved,
    in_batches,
    random_packed,
)
from patch_lists import PatchList
from torch import Tensor
from torch.nn import functional as F

from anomaly.config.parsing import parse_config
from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.scorers.patchcore import array_bank, method
from anomaly.scorers.patchcore.bank_pair import BankPair
from anomaly.scorers.patchcore.fitter import MemoryBankFitter
from anomaly.scorers.patchcore.levels import Coarse, Fine
from anomaly.scorers.patchcore.memory_bank import MemoryBank
from anomaly.scorers.patchcore.memory_bank_pair import BankPairFitter, MemoryBankPair
from anomaly.scorers.patches import PatchSet, PointsOf

CPU = torch.device("cpu")
FOLDS = [(0, 1), (2, 3, 4), (5,)]


def _fitter(ratio: float | None = 0.2, size: int | None = None, **settings: Any) -> BankPairFitter:
    banks = MemoryBankFitter(ratio, size, **settings)
    made = BankPairFitter(banks).prepared([FINE, COARSE], [8, 16], CPU)
    assert isinstance(made, BankPairFitter)
    return made


def _inside(images: int, grid: tuple[int, int] = (6, 4), share: float = 0.6) -> Tensor:
    return torch.rand(images, *grid, generator=torch.Generator().manual_seed(7)) < share


def _coarse(patches: Tensor) -> Tensor:
    return coarse_of(patches).float()


def _lead_back(pair: MemoryBankPair, patches: Tensor, first: int = 0) -> None:
    """Each vector is that of the patch which its origin names."""
    for bank, seen in ((pair.fine, patches[..., :FINE]), (pair.coarse, _coarse(patches))):
        images, rows, columns = bank.origins.long().T
        torch.testing.assert_close(bank.vectors, seen[images - first, rows, columns])


def test_prepared_finds_the_layers_of_the_finer_grid() -> None:
    fitter = BankPairFitter(MemoryBankFitter())
    for channels, strides, fine in (
        ([128, 256], [8, 16], 128),
        ([256, 128], [16, 8], 128),
        ([3, 16, 5, 8], [4, 8, 4, 8], 8),
        ([7, 4], [1, 2], 7),
        ([2, 2, 2], [8, 16, 16], 2),  # together they can be dealt out
    ):
        made = fitter.prepared(channels, strides, CPU)
        assert isinstance(made, BankPairFitter)
        assert made.channels == fine
        assert made.banks is fitter.banks
        assert [one.view for one in made.projected_by] == [Fine(fine), Coarse(fine)]


@pytest.mark.parametrize(
    ("channels", "strides"),
    [
        ([64], [8]),
        ([64, 32], [8, 8]),
        ([64, 64, 64], [4, 8, 16]),
        ([64, 64], [4, 16]),
        ([64, 64], [8, 24]),
        ([64, 66], [8, 16]),
        ([64, 3, 3], [8, 16, 16]),
    ],
)
def test_other_layers_have_one_bank(channels: Sequence[int], strides: Sequence[int]) -> None:
    banks = MemoryBankFitter(seed=3)
    assert BankPairFitter(banks).prepared(channels, strides, CPU) is banks


def test_layers_have_to_be_known() -> None:
    with pytest.raises(ValueError, match="prepared"):
        BankPairFitter(MemoryBankFitter()).fit(in_batches(random_packed(3)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("ratio", "size", "limit"),
    [(0.2, None, 1 << 20), (None, 21, 1 << 20), (0.1, None, 4 * 128 * 40), (1.0, None, 1 << 20)],
)
def test_a_fit_is_that_of_two_fitters(
    ratio: float | None, size: int | None, limit: int, masked: bool
) -> None:
    inside = _inside(6) if masked else None
    batches = in_batches(random_packed(6), inside=inside)
    pair = _fitter(ratio, size, seed=4, memory_limit=limit, reweighting=5).fit(batches)
    one = MemoryBankFitter(ratio, size, seed=4, memory_limit=limit, reweighting=5)
    other = replace(one, coreset_size=size and math.ceil(size / 4))
    wanted = one.fit(fine_batches(batches)), other.fit(coarse_batches(batches))
    for bank, expected in zip((pair.fine, pair.coarse), wanted, strict=True):
        assert torch.equal(bank.origins, expected.origins)
        torch.testing.assert_close(bank.vectors, expected.vectors)
        assert bank.covering_radius == pytest.approx(expected.covering_radius, rel=1e-5)
        assert (bank.exact, bank.reweighting) == (expected.exact, 5)
    _lead_back(pair, random_packed(6))
    if size is not None:
        assert (len(pair.fine.vectors), len(pair.coarse.vectors)) == (21, 6)
    if masked and ratio == 1:
        assert len(pair.fine.vectors) == int(inside.sum())  # type: ignore[union-attr]
        assert len(pair.coarse.vectors) == int(halved(inside).sum())  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "coarse"), [(1, 1), (4, 1), (5, 2), (48, 12)])
def test_the_coarse_bank_keeps_a_quarter_as_many(size: int, coarse: int) -> None:
    pair = _fitter(None, size).fit(in_batches(random_packed(2)))
    assert (len(pair.fine.vectors), len(pair.coarse.vectors)) == (size, coarse)


def test_tiles_and_turned_copies_keep_their_places() -> None:
    patches = random_packed(4)
    corners = ((0, 0), (6, 4), (65536, 0), (3 * 65536 + 6, 4))
    pair = _fitter(1.0).fit(in_batches(patches, corners=corners))
    for bank, seen, step in (
        (pair.fine, patches[..., :FINE], 1),
        (pair.coarse, _coarse(patches), 2),
    ):
        for vector, (image, row, column) in zip(bank.vectors, bank.origins.tolist(), strict=True):
            turn, inner = divmod(corners[image][0], 65536)
            at = row - 65536 * turn - inner // step, column - corners[image][1] // step
            torch.testing.assert_close(vector, seen[image, at[0], at[1]])
        assert len(bank.vectors) == patches[..., 0].numel() // step**2


def test_settings_that_cannot_be_had() -> None:
    with pytest.raises(DataError, match="no training patches"):
        _fitter().fit(PatchList([]))
    with pytest.raises(ConfigError, match="outside 1 to 48"):
        _fitter(None, 49).fit(in_batches(random_packed(2)))
    patches = random_packed(2)
    patches[1, 2, 2, FINE] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        _fitter().fit(in_batches(patches))


class _Listening(PatchList):
    """Notes what is said and asked of it."""

    def __init__(self, batches: PatchList) -> None:
        super().__init__(batches.batches)
        self.said: list[Sequence[PointsOf]] = []
        self.asked: list[PointsOf] = []

    def will_project(self, projections: Sequence[PointsOf]) -> None:
        assert not self.asked
        self.said.append(projections)

    def projected(self, projection: PointsOf) -> Any:
        self.asked.append(projection)
        return super().projected(projection)


def test_projections_are_said_before_they_are_asked_for() -> None:
    fitter, batches = _fitter(seed=5), _Listening(in_batches(random_packed(3)))
    fitter.fit(batches)
    ((fine, coarse),) = batches.said
    assert [one.view for one in batches.asked] == [fine.view, coarse.view]
    for said, asked, channels in zip(
        (fine, coarse), batches.asked, (FINE, FINE + COARSE), strict=True
    ):
        assert torch.equal(said.matrix_of(channels), asked.matrix_of(channels))


@pytest.mark.parametrize("limit", [1 << 20, 4 * 128 * 40])
def test_progress_goes_on_to_the_end(limit: int) -> None:
    told: list[tuple[int, int]] = []
    pair = _fitter(0.3, memory_limit=limit).fit(
        in_batches(random_packed(20)), lambda done, total: told.append((done, total))
    )
    done = [some for some, _ in told]
    assert done == sorted(done)
    every = len(pair.fine.vectors) + len(pair.coarse.vectors)
    assert told[-1] == (every, every)
    # The coarse bank is foreseen, so that nothing seems to be ready before it is.
    assert [some < total for some, total in told] == [True] * (len(told) - 1) + [False]
    shares = [some / total for some, total in told]
    assert shares == pytest.approx(sorted(shares), rel=0.01)


@pytest.mark.parametrize("masked", [False, True])
def test_a_fold_is_in_neither_bank(masked: bool) -> None:
    patches = random_packed(6)
    batches = in_batches(patches, inside=_inside(6) if masked else None)
    fitter = _fitter(0.2)
    pair, seen = fitter.fit(batches), []
    for fold, left in fitter.held_out(pair, batches, FOLDS, grouped=False):
        seen.append(fold)
        for bank, whole in ((left.fine, pair.fine), (left.coarse, pair.coarse)):
            assert not {*fold} & {*bank.origins[:, 0].tolist()}
            assert 0 < len(bank.vectors) <= len(whole.vectors)
        _lead_back(left, patches)
    assert seen == FOLDS
    # Each is what a single bank would be.
    for level, bank, some in (
        ("fine", pair.fine, fine_batches(batches)),
        ("coarse", pair.coarse, coarse_batches(batches)),
    ):
        alone = fitter.banks.held_out(bank, some, FOLDS, grouped=False)
        both = fitter.held_out(pair, batches, FOLDS, grouped=False)
        for (_, expected), (_, left) in zip(alone, both, strict=True):
            assert torch.equal(getattr(left, level).origins, expected.origins)


def test_banks_grow_until_they_cover_new_patches_and_leave_them_out_again() -> None:
    old, new = random_packed(8), random_packed(5, seed=1, shift=1.5)
    fitter = _fitter(0.25)
    pair = fitter.fit(in_batches(old))
    growing = BankPairFitter(fitter.banks).continuing(pair, 8)
    assert growing.channels == FINE
    batches = in_batches(new, first=8)
    longer = growing.fit(batches)
    for bank, base, seen in (
        (longer.fine, pair.fine, new[..., :FINE]),
        (longer.coarse, pair.coarse, _coarse(new)),
    ):
        count = len(base.vectors)
        assert len(bank.vectors) > count
        assert torch.equal(bank.vectors[:count], base.vectors)
        assert bank.covering_radius == base.covering_radius
        # The projection of so few channels keeps distances.
        farthest = torch.cdist(seen.flatten(0, 2).double(), bank.vectors.double()).amin(1).max()
        assert float(farthest) <= base.covering_radius * 1.001
        images, rows, columns = bank.origins[count:].long().T
        torch.testing.assert_close(bank.vectors[count:], seen[images - 8, rows, columns])
    folds, found = [(8, 9), (10, 11, 12)], []
    for fold, left in growing.held_out(longer, batches, folds, grouped=True):
        found.append(fold)
        assert not torch.is_inference_mode_enabled()
        for bank, base in ((left.fine, pair.fine), (left.coarse, pair.coarse)):
            assert torch.equal(bank.vectors[: len(base.vectors)], base.vectors)
            assert not {*fold} & {*bank.origins[:, 0].tolist()}
            others = {image for other in folds if other != fold for image in other}
            assert others & {*bank.origins[:, 0].tolist()}
    assert found == folds
    assert not torch.is_inference_mode_enabled()
    again = fitter.continuing(longer, 13).fit(in_batches(new, first=13))
    assert torch.equal(again.fine.vectors, longer.fine.vectors)
    assert torch.equal(again.coarse.vectors, longer.coarse.vectors)


def test_merged_banks_hold_every_patch_once() -> None:
    fitter = _fitter(0.3)
    first, second = (fitter.fit(in_batches(random_packed(4, seed=k))) for k in (0, 1))
    numbers = [{i: i for i in range(4)}, {i: 4 + i for i in range(4)}]
    merged = fitter.merged([first, second], numbers)
    for bank, one, other in (
        (merged.fine, first.fine, second.fine),
        (merged.coarse, first.coarse, second.coarse),
    ):
        assert torch.equal(bank.vectors, torch.cat([one.vectors, other.vectors]))
        moved = other.origins + torch.tensor([4, 0, 0], dtype=torch.int32)
        assert torch.equal(bank.origins, torch.cat([one.origins, moved]))
    same = fitter.merged([first, first], [numbers[0], numbers[0]])
    assert torch.equal(same.fine.vectors, first.fine.vectors)
    assert torch.equal(same.coarse.vectors, first.coarse.vectors)


def test_another_networks_patches_take_the_places_of_the_first_ones() -> None:
    fitter, patches = _fitter(0.3), random_packed(5)
    pair = fitter.fit(in_batches(patches))
    other = random_packed(5, seed=3)
    new = fitter.again(pair, in_batches(other, size=3))
    assert torch.equal(new.fine.origins, pair.fine.origins)
    assert torch.equal(new.coarse.origins, pair.coarse.origins)
    _lead_back(new, other)
    for bank, seen in ((new.fine, other[..., :FINE]), (new.coarse, _coarse(other))):
        farthest = torch.cdist(seen.flatten(0, 2).double(), bank.vectors.double()).amin(1).max()
        assert bank.covering_radius == pytest.approx(float(farthest), rel=1e-4)
    with pytest.raises(DataError, match="train again"):
        fitter.again(pair, in_batches(other[:3]))


def _pair() -> MemoryBankPair:
    return _fitter(0.3).fit(in_batches(random_packed(6)))


def _brute(pair: MemoryBankPair, asked: Tensor) -> Tensor:
    """Scores in float64, differentiable."""
    near = torch.cdist(asked[..., :FINE].double().flatten(0, 2), pair.fine.vectors.double())
    seen = coarse_of(asked)
    around = torch.cdist(seen.flatten(0, 2), pair.coarse.vectors.double()).amin(1)
    up = F.interpolate(
        around.view(len(asked), 1, *seen.shape[1:3]), scale_factor=2, mode="bilinear"
    )
    return near.amin(1).view(asked.shape[:3]) + up[:, 0]


@pytest.mark.parametrize("grid", [(2, 2), (6, 4), (10, 14)], ids=str)
def test_scores_are_those_of_brute_force(grid: tuple[int, int]) -> None:
    pair, asked = _pair(), random_packed(3, grid, seed=8)
    found = pair.score(asked)
    assert (found.scores.shape, found.scores.dtype) == ((3, *grid), torch.float32)
    torch.testing.assert_close(found.scores.double(), _brute(pair, asked), rtol=1e-5, atol=1e-5)
    nearest = torch.cdist(asked[..., :FINE].double().flatten(0, 2), pair.fine.vectors.double())
    assert torch.equal(found.nearest.flatten(), nearest.argmin(1))  # type: ignore[union-attr]
    # Arrays are scored alike, and an image is alone as it is among others.
    arrays = BankPair(
        *(
            array_bank.ArrayBank(b.vectors.numpy(), b.origins.numpy(), "sharp", 3)
            for b in (pair.fine, pair.coarse)
        )
    )
    other = arrays.score(asked.numpy())
    np.testing.assert_allclose(other.scores, found.scores.numpy(), rtol=1e-5, atol=1e-5)
    assert np.array_equal(other.nearest, found.nearest.numpy())  # type: ignore[union-attr]
    alone = torch.cat([pair.score(one[None]).scores for one in asked])
    torch.testing.assert_close(alone, found.scores, rtol=1e-6, atol=1e-6)


def test_training_patches_in_full_banks_score_nothing() -> None:
    patches = random_packed(3)
    pair = _fitter(1.0).fit(in_batches(patches))
    assert float(pair.score(patches).scores.max()) <= 1e-5


def test_scores_have_gradients() -> None:
    pair, asked = _pair(), random_packed(2, seed=8).requires_grad_()
    weights = torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(0))
    (found,) = torch.autograd.grad((pair.score(asked).scores * weights).sum(), asked)
    (expected,) = torch.autograd.grad((_brute(pair, asked) * weights).sum(), asked)
    assert bool((found != 0).all())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_other_channels_are_refused() -> None:
    pair = _pair()
    assert pair.dimensions == FINE + COARSE // 4
    with pytest.raises(DataError, match="9 channels where the memory bank's have 8"):
        pair.score(torch.zeros(1, 2, 2, 9))


def test_evidence_is_of_the_coarse_bank_on_the_finer_grid() -> None:
    pair, asked = _pair(), random_packed(1, seed=8)
    turned = pair.coarse.origins + torch.tensor([0, 3 << 16, 0], dtype=torch.int32)
    for some in (pair, replace(pair, coarse=replace(pair.coarse, origins=turned))):
        for patch in ((0, 0), (1, 2), (asked.shape[1] - 1, asked.shape[2] - 1)):
            distances, origins = some.evidence(asked[0], patch, 3)
            here = coarse_of(asked)[0, patch[0] // 2, patch[1] // 2]
            exact = torch.cdist(here[None].double(), pair.coarse.vectors.double())[0].sort()
            torch.testing.assert_close(distances.double(), exact.values[:3], rtol=1e-5, atol=1e-5)
            turn = 3 << 16 if some is not pair else 0
            wanted = pair.coarse.origins[exact.indices[:3]] * torch.tensor([1, 2, 2])
            wanted += torch.tensor([0, turn + patch[0] % 2, patch[1] % 2])
            assert torch.equal(origins, wanted.int())


def _settings(**model: object) -> dict[str, Any]:
    return parse_config({"model": model}, "a test").model.model_dump()


@pytest.mark.parametrize("search", ["exact", "faiss"])
def test_saved_tensors_and_back(search: str, tmp_path: Path) -> None:
    pair, asked = _pair(), random_packed(2, seed=8)
    tensors, settings = pair.tensors(), _settings(search=search, neighbours=7)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    back = method.scorer(tensors, settings, device=CPU, cache=tmp_path)
    assert isinstance(back, MemoryBankPair)
    torch.testing.assert_close(back.score(asked).scores, pair.score(asked).scores)
    for bank, saved in ((back.fine, pair.fine), (back.coarse, pair.coarse)):
        assert torch.equal(bank.origins, saved.origins)
        assert (bank.covering_radius, bank.exact) == (saved.covering_radius, saved.exact)
        assert (bank.search, bank.reweighting) == ("auto" if search == "exact" else search, 7)
    assert back.tensors().keys() == tensors.keys()
    back.check_origin(FINE + COARSE, 6)
    with pytest.raises(ModelError, match="15 channels where its scorer has 14"):
        back.check_origin(FINE + COARSE + 1, 6)
    with pytest.raises(ModelError, match="training image 5, of 5"):
        back.check_origin(FINE + COARSE, 5)
    assert torch.equal(back.to("cpu").score(asked).scores, back.score(asked).scores)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    exported = array_bank.scorer(arrays, settings).score(asked.numpy())
    np.testing.assert_allclose(exported.scores, pair.score(asked).scores.numpy(), rtol=1e-5)


def test_tampered_tensors_are_refused(tmp_path: Path) -> None:
    tensors, settings = _pair().tensors(), _settings()
    for name, tensor, says in (
        ("middle.vectors", tensors["fine.vectors"], "tensor middle.vectors is unknown"),
        ("vectors", tensors["fine.vectors"], "tensor vectors is unknown"),
        ("coarse.other", tensors["fine.vectors"], "other are missing or unknown"),
        ("coarse.origins", tensors["coarse.origins"][:3], "doesn't go with the others"),
        ("fine.vectors", tensors["fine.vectors"].double(), "doesn't go with the others"),
        ("fine.vectors", tensors["fine.vectors"] * torch.nan, "NaN or infinite"),
    ):
        with pytest.raises(ModelError, match=says):
            method.scorer({**tensors, name: tensor}, settings, device=CPU, cache=tmp_path)
    for name in tensors:
        fewer = {key: tensor for key, tensor in tensors.items() if key != name}
        with pytest.raises(ModelError, match="missing"):
            method.scorer(fewer, settings, device=CPU, cache=tmp_path)


@pytest.mark.parametrize(
    ("embedding", "aligned"), [("levels", "sharp"), ("sharp", "sharp"), ("concat", "concat")]
)
def test_a_single_bank_is_loaded_as_one(embedding: str, aligned: str, tmp_path: Path) -> None:
    """Layers on one grid have no other, whatever the config names."""
    settings = _settings(embedding=embedding, neighbours=9)
    fitter = method.fitter(settings, seed=0, memory_limit=1 << 20)
    made = fitter.prepared([8], [8], CPU)
    assert isinstance(made, MemoryBankFitter)
    assert made.embedding == aligned
    bank = made.fit(in_batches(random_packed(4)))
    back = method.scorer(bank.tensors(), settings, device=CPU, cache=tmp_path)
    assert isinstance(back, MemoryBank)
    assert (back.embedding, back.reweighting) == (aligned, 9)
    assert back.align is made.align
    assert torch.equal(back.vectors, bank.vectors)
    back.check_origin(8, 4)


@pytest.mark.parametrize(("size", "ratio"), [(None, 0.3), (30, None)])
def test_a_config_names_the_fitter(size: int | None, ratio: float | None) -> None:
    settings = _settings(coreset_size=size, coreset_ratio=0.3, neighbours=4)
    fitter = method.fitter(settings, seed=11, memory_limit=1234)
    assert isinstance(fitter, BankPairFitter)
    wanted = MemoryBankFitter(ratio, size, seed=11, memory_limit=1234, reweighting=4)
    assert fitter.banks == wanted
    pair = _fitter().fit(in_batches(random_packed(2)))
    assert fitter.align is pair.align
    assert fitter.align is not wanted.align


def test_images_are_numbered_as_the_fit_says() -> None:
    """What is learned of some images alone has their numbers."""
    patches: PatchSet = in_batches(random_packed(6)).only({1, 4})
    pair = _fitter(1.0).fit(patches)
    assert {*pair.fine.origins[:, 0].tolist()} == {*pair.coarse.origins[:, 0].tolist()} == {1, 4}
