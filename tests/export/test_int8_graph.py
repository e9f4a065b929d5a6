"""Rounding a graph to int8: equalised channels say the same, and lose less."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anomaly.backbones.engine import Graph
from anomaly.backbones.registry import Normalisation
from anomaly.errors import ModelError
from anomaly.export import int8_graph

PLAIN = Normalisation(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


class _Uneven(nn.Module):
    """A convolution whose channels reach from 0.01 to 100, a sum, and a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        a, b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        c, d = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, groups=4, padding=1)
        self.network = nn.ModuleDict({"a": a, "b": b, "c": c, "d": d})
        with torch.no_grad():
            scale = torch.logspace(-2, 2, 16)
            a.weight *= scale[:, None, None, None]
            assert a.bias is not None
            a.bias *= scale
            b.weight /= scale[:, None, None]

    def forward(self, images: Tensor) -> Tensor:
        net = self.network
        pooled = nn.functional.max_pool2d(torch.relu(net["a"](images)), 2)
        inner = torch.relu(net["b"](pooled))
        made: Tensor = net["d"](inner + torch.relu(net["c"](inner)))
        return made


class _Signed(nn.Module):
    """Layers without an activation at their end, the first of which is read on, and pooled."""

    def __init__(self) -> None:
        super().__init__()
        a, b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.network = nn.ModuleDict({"a": a, "b": b})

    def forward(self, images: Tensor) -> Tensor:
        first = self.network["a"](images)
        other = self.network["b"](torch.relu(first))
        maps = first, first + other
        return torch.cat([nn.functional.avg_pool2d(m, 3, stride=1, padding=1) for m in maps], 1)


def written(network: nn.Module, file: Path) -> Path:
    torch.manual_seed(0)
    program = torch.onnx.export(
        network.eval(), (torch.rand(1, 3, 32, 32),), input_names=["images"],
        output_names=["embeddings"], dynamo=True, opset_version=18, verbose=False,
    )  # fmt: skip
    assert program is not None
    program.save(file)
    return file


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return written(_Uneven(), tmp_path / "g.onnx")


def images(seed: int) -> Callable[[str], Iterator[NDArray[np.float32]]]:
    def made(_: str) -> Iterator[NDArray[np.float32]]:
        rng = np.random.default_rng(seed)
        yield from (rng.random((1, 3, 32, 32), dtype=np.float32) for _ in range(6))

    return made


def run(model: onnx.ModelProto | Path) -> NDArray[np.float32]:
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(given)
    return np.concatenate([session.run(None, {"images": x})[0] for x in images(1)("")])


def test_equalised_channels_say_the_same_and_reach_alike(graph: Path) -> None:
    before, model = run(graph), onnx.load(graph)
    links = [*int8_graph._links(model.graph)]
    # Not those that a sum reads, nor what a grouped convolution reads.
    assert [link.writer.input[1] for link in links] == ["network.a.weight"]
    int8_graph._equalise(model, images(0))
    np.testing.assert_allclose(run(model), before, rtol=1e-4, atol=1e-5 * np.abs(before).max())
    (reach,) = int8_graph._reaches(model, links, images(0))
    assert reach.max() / reach.min() < 200  # 10⁴ before: the root of both ratios


def test_what_is_stored_once_for_two_convolutions_is_left_alone(graph: Path) -> None:
    model = onnx.load(graph)
    names = [one.name for one in model.graph.initializer]
    first, second = (f"network.{one}.bias" for one in "ac")
    assert {first, second} <= {*names}
    for node in model.graph.node:
        node.input[:] = [first if name == second else name for name in node.input]
    before = run(model)
    int8_graph._equalise(model, images(0))
    assert np.array_equal(run(model), before)


def test_less_is_lost_than_by_rounding_alone(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true, lost = run(graph), []
    for equalise in (lambda *_: None, int8_graph._equalise):
        rounded = graph.with_name("rounded.onnx")
        rounded.write_bytes(graph.read_bytes())
        monkeypatch.setattr(int8_graph, "_equalise", equalise)
        int8_graph.quantise(rounded, images(0), PLAIN)
        lost.append(np.linalg.norm(run(rounded) - true) / np.linalg.norm(true - true.mean()))
    assert lost[1] < lost[0] / 2
    assert lost[1] < 0.2


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_what_is_pooled_may_be_negative(engine: str, tmp_path: Path) -> None:
    """OpenVINO pools whole numbers, and took the zeros around an image for a negative value."""
    pytest.importorskip({"onnx": "onnxruntime"}.get(engine, engine))
    torch.manual_seed(0)
    file = written(_Signed(), tmp_path / "g.onnx")
    true = run(file)
    int8_graph.quantise(file, images(0), PLAIN)
    computed = Graph(file, engine, "int8", 1)
    made = np.concatenate([computed(x)[0] for x in images(1)("")])
    off = np.abs(made - true).mean((0, 1))
    inner = off[1:-1, 1:-1].mean()
    assert inner < 0.1 * true.std()
    assert max(off[[0, -1]].mean(), off[:, [0, -1]].mean()) < 2 * inner


def test_the_input_keeps_what_no_training_image_shows(graph: Path) -> None:
    """Ranges come from dark images; a bright one isn't cut off."""

    def dark(stage: str) -> Iterator[NDArray[np.float32]]:
        yield from (x / np.float32(4) for x in images(0)(stage))

    int8_graph.quantise(graph, dark, PLAIN)
    stored = {one.name: one for one in onnx.load(graph).graph.initializer}
    scale = onnx.numpy_helper.to_array(stored["images_scale"])
    assert scale == pytest.approx(1 / 255)


@pytest.mark.parametrize(("operator", "inputs"), [("LayerNormalization", 2), ("Relu", 1)])
def test_a_network_without_convolutions_is_refused(
    operator: str, inputs: int, tmp_path: Path
) -> None:
    node = onnx.helper.make_node(operator, ["images"] * inputs, ["embeddings"])
    value, out = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3])
        for name in ("images", "embeddings")
    )
    graph = onnx.helper.make_graph([node], "g", [value], [out])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "g.onnx")
    with pytest.raises(ModelError, match="int8 is for convolutions"):
        int8_graph.quantise(tmp_path / "g.onnx", images(0), PLAIN)
