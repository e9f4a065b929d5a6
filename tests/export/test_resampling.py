"""Resampling by products says what torch says, also in a traced program whose sizes are free."""

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from anomaly.export.graph import bicubic_antialiased, resampled_by_products


def test_torchs_own() -> None:
    maps = torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(0))
    for size in ((4, 5), (32, 40), (2, 2), (17, 9), (1, 1)):
        expected = F.interpolate(maps, size=size, mode="bicubic", antialias=True)
        assert torch.allclose(bicubic_antialiased(maps, [*size], False), expected, atol=1e-5)


class _Placed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, 8, 8))
        self.how = how

    def forward(self, images: Tensor) -> Tensor:
        grid = (images.shape[2] // 14, images.shape[3] // 14)
        antialias = self.how == "bicubic"
        return images.mean() + F.interpolate(
            self.positions, size=grid, mode=self.how, antialias=antialias
        )


def _traced(network: nn.Module) -> torch.export.ExportedProgram:
    sides = {2: 14 * Dim("rows"), 3: 14 * Dim("columns")}
    example = (torch.rand(1, 3, 56, 70),)
    return torch.export.export(network.eval(), example, dynamic_shapes=(sides,), strict=False)


def test_a_traced_program_goes_without() -> None:
    network = _Placed("bicubic")
    program = resampled_by_products(_traced(network))
    assert not any("upsample" in str(node.target) for node in program.graph.nodes)
    for size in ((56, 70), (224, 112), (28, 28)):
        images = torch.rand(1, 3, *size)
        assert torch.allclose(program.module()(images), network(images), atol=1e-5)


def test_one_without_it_stays_as_it_is() -> None:
    program = _traced(_Placed("nearest"))
    assert resampled_by_products(program) is program
