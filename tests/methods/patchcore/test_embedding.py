"""Patch embeddings against forms that unfold every neighbourhood, as the reference does."""

import torch
from torch import Tensor
from torch.nn import functional as F

from anomaly.methods.patchcore.embedding import patchcore_concat, patchcore_sharp


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


def test_the_finest_grid_wins_whatever_the_order_and_memory_format() -> None:
    fine, coarse = _maps([3, 5], [(4, 6), (2, 3)])
    for align in (patchcore_concat, patchcore_sharp):
        one = align([coarse, fine.contiguous(memory_format=torch.channels_last)])
        other = align([fine, coarse])
        assert one.shape == (2, 4, 6, 8)
        torch.testing.assert_close(one[..., 5:], other[..., :3])
        torch.testing.assert_close(one[..., :5], other[..., 3:])
