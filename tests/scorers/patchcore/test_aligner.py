"""Patch embeddings against forms that unfold every neighbourhood, as the reference does."""

import pytest
import torch
from packed_patches import packed
from torch import Tensor
from torch.nn import functional as F

from anomaly.scorers.patchcore.aligner import (
    patchcore_adaptive,
    patchcore_concat,
    patchcore_levels,
    patchcore_sharp,
)


def _maps(channels: list[int], sizes: list[tuple[int, int]], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, c, *s, generator=generator) for c, s in zip(channels, sizes, strict=True)
    ]


def _unfolded(m: Tensor) -> Tensor:
    """(B, C, 9, h, w): the 3×3 neighbourhood of each position, zeros beyond the border."""
    b, c, h, w = m.shape
    return F.unfold(m, 3, padding=1).reshape(b, c, 9, h, w)


def _reference_concat(maps: list[Tensor]) -> Tensor:
    finest = maps[0].shape[-2:]
    means = [_unfolded(m).mean(2) for m in maps]
    up = [F.interpolate(m, size=finest, mode="bilinear", align_corners=False) for m in means]
    return torch.cat(up, 1).permute(0, 2, 3, 1)


def _reference_adaptive(maps: list[Tensor]) -> Tensor:
    """The reference's steps: unfold, up-sample the unfolded, pool each to 1024, stack, pool."""
    finest = maps[0].shape[-2:]
    pooled = []
    for m in maps:
        unfolded = _unfolded(m).flatten(1, 2)
        up = F.interpolate(unfolded, size=finest, mode="bilinear", align_corners=False)
        rows = up.permute(0, 2, 3, 1).flatten(0, 2)
        pooled.append(F.adaptive_avg_pool1d(rows[:, None], 1024)[:, 0])
    stacked = torch.stack(pooled, dim=1).flatten(1)
    embedded = F.adaptive_avg_pool1d(stacked[:, None], 1024)[:, 0]
    return embedded.reshape(maps[0].shape[0], *finest, 1024)


def test_concat_equals_the_unfolded_form() -> None:
    maps = _maps([16, 24], [(12, 10), (6, 5)])
    torch.testing.assert_close(patchcore_concat(maps), _reference_concat(maps))


def test_sharp_weighs_the_finest_layers_centre_as_its_eight_neighbours_together() -> None:
    maps = _maps([16, 4, 24], [(12, 10), (12, 10), (6, 5)])
    found = patchcore_sharp(maps)
    assert found.shape == (2, 12, 10, 44)
    weights = torch.ones(9)
    weights[4] = 8
    fine = [(_unfolded(m) * weights[:, None, None]).sum(2) / 16 for m in maps[:2]]
    torch.testing.assert_close(found[..., :20], torch.cat(fine, 1).permute(0, 2, 3, 1))
    torch.testing.assert_close(found[..., 20:], _reference_concat(maps)[..., 20:])
    assert patchcore_sharp([m.bfloat16() for m in maps]).dtype == torch.float32


@pytest.mark.parametrize(
    "channels",
    [[512, 1024], [32, 96], [24, 32, 96], [256], [40, 112], [2048, 1024]],
    ids=str,
)
def test_adaptive_equals_the_reference_steps(channels: list[int]) -> None:
    sizes = [(8, 6), (4, 3), (2, 2)][: len(channels)]
    maps = _maps(channels, sizes)
    ours = patchcore_adaptive(maps)
    assert ours.shape == (2, 8, 6, 1024)
    torch.testing.assert_close(ours, _reference_adaptive(maps), rtol=1e-5, atol=1e-6)


def test_the_finest_grid_wins_whatever_the_order_and_memory_format() -> None:
    fine, coarse = _maps([3, 5], [(4, 6), (2, 3)])
    for align in (patchcore_concat, patchcore_sharp):
        one = align([coarse, fine.contiguous(memory_format=torch.channels_last)])
        other = align([fine, coarse])
        assert one.shape == (2, 4, 6, 8)
        torch.testing.assert_close(one[..., 5:], other[..., :3])
        torch.testing.assert_close(one[..., :5], other[..., 3:])


def _reference_levels(fine: list[Tensor], coarse: list[Tensor]) -> Tensor:
    """Maps of two grids, each in its order, packed on twice the coarse grid; in float64."""
    height, width = (2 * side for side in coarse[0].shape[-2:])
    near = []
    for m in (m.double() for m in fine):
        # Of the nine patches, how many lie in the image.
        share = _unfolded(torch.ones_like(m)).mean(2)
        sharp = 0.75 * share * m + 0.25 * _unfolded(m).mean(2)
        near.append(F.interpolate(sharp, size=(height, width), mode="bilinear"))
    means = [_unfolded(m.double()).mean(2) for m in coarse]
    grid = coarse[0].shape[-2:]
    around = torch.cat([F.interpolate(m, size=grid, mode="bilinear") for m in means], 1)
    return packed(torch.cat(near, 1).permute(0, 2, 3, 1), around.permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("channels", "sizes", "count"),
    [
        ([3, 8], [(12, 10), (6, 5)], 1),
        ([3, 2, 4, 8], [(4, 6), (4, 6), (2, 3), (2, 3)], 2),
        ([3, 2, 6], [(6, 8), (3, 4), (3, 4)], 1),  # dealt out together
        ([5, 4], [(2, 2), (1, 1)], 1),
        ([3, 4], [(13, 13), (7, 7)], 1),
        ([3, 4], [(15, 13), (7, 6)], 1),
        ([3, 2, 4], [(13, 8), (13, 8), (7, 4)], 2),
        ([3, 4], [(6, 9), (3, 5)], 1),
        ([3, 2, 5, 3], [(31, 47), (29, 45), (14, 22), (12, 20)], 2),  # no padding, as Inception
    ],
    ids=str,
)
def test_levels_pack_the_coarse_grid_on_the_fine_one(
    channels: list[int], sizes: list[tuple[int, int]], count: int
) -> None:
    maps = _maps(channels, sizes)
    fine, coarse = maps[:count], maps[count:]
    found = patchcore_levels(maps)
    dimensions = sum(m.shape[1] for m in fine) + sum(m.shape[1] for m in coarse) // 4
    grid = (2 * sizes[count][0], 2 * sizes[count][1])
    assert (found.shape, found.dtype) == ((2, *grid, dimensions), torch.float32)
    expected = _reference_levels(fine, coarse)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)
    # In any order of grids, in any memory format, and in few digits.
    last = [m.contiguous(memory_format=torch.channels_last) for m in [*coarse, *fine]]
    torch.testing.assert_close(patchcore_levels(last), found)
    mixed = [coarse[0], *fine, *coarse[1:]]
    torch.testing.assert_close(patchcore_levels(mixed), found)
    rough = patchcore_levels([m.bfloat16() for m in maps])
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, found, rtol=0.05, atol=0.05)


def test_levels_of_an_even_map_are_even_but_for_the_border() -> None:
    """The centre is lowered along the border as the mean is, so that both go together there."""
    found = patchcore_levels([torch.ones(1, 1, 6, 4), torch.zeros(1, 4, 3, 2)])[0, :, :, 0]
    rows, columns = torch.tensor([2, 3, 3, 3, 3, 2]) / 3, torch.tensor([2, 3, 3, 2]) / 3
    torch.testing.assert_close(found, rows[:, None] * columns)


def test_levels_as_a_graph_of_images_of_any_size() -> None:
    class Aligned(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return patchcore_levels([F.avg_pool2d(images, 4), F.pixel_unshuffle(images, 8)])

    rows, columns = (torch.export.Dim(name, min=1, max=64) for name in ("rows", "columns"))
    sizes = {2: 8 * rows, 3: 8 * columns}
    (images,) = _maps([3], [(32, 24)])
    graph = torch.export.export(Aligned(), (images,), dynamic_shapes=(sizes,), strict=False)
    for asked in (images, *_maps([3], [(16, 40)], seed=1)):
        torch.testing.assert_close(graph.module()(asked), Aligned()(asked))
    (images,) = _maps([3], [(5, 5)])
    half = _maps([8], [(3, 3)])[0]

    class Odd(torch.nn.Module):
        def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
            return patchcore_levels([fine, coarse])

    odd = torch.export.export(Odd(), (images, half), strict=False).module()
    torch.testing.assert_close(odd(images, half), patchcore_levels([images, half]))
