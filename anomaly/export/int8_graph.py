"""An ONNX graph in int8: ranges of channels are equalised, then weights and activations rounded.

Activations are rounded tensor by tensor, so that the channel with the widest range decides how
finely all others are kept. Behind a ReLU, a channel may be made smaller and the weights that read
it larger by the same factor, and nothing changes but the rounding (cross-layer equalisation, Nagel
et al. 2019, "Data-free quantization through weight equalization and bias correction"; the factors
weigh both sides alike, as in Xiao et al. 2023, "SmoothQuant"). Ranges are means of what single
images reach, and the network's input has that of all images that there can be. On ResNet-50's
embeddings all of that takes away a quarter of what rounding adds. What an average pool reads isn't
rounded where it may be negative, so that all engines say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.backbones.registry import Normalisation
from anomaly.errors import AnomalyError, ModelError
from anomaly.export.graph import quiet
from anomaly.runtime.parallel import get_threads

# Computed in int8 beside a convolution; attention and the method's alignment stay in fp32.
_OPERATORS = ["Conv", "Add", "Clip", "MaxPool", "Relu"]
_BACKBONE = "network."  # part of its weights' names
# Smallest range of a channel, as a share of the widest one: limits the scaling of channels that #
# are hardly active on good images.
_NARROWEST = 0.01

# Network inputs (1, 3, H, W), for the stage of that name.
Inputs = Callable[[str], Iterator[NDArray[np.float32]]]


def quantise(file: Path, inputs: Inputs, normalise: Normalisation) -> None:
    """Rewrite a graph: quantised weights, and pairs of nodes that round its activations.

    Weights have 7 bits. Processors without VNNI add products of 8 × 8 bits in pairs, within 16
    bits, which overflow: with 8 bits ResNet-50's embeddings there are something else altogether.
    With 7 bits none can, and all processors give the same bits.

    Args:
        file: an ONNX graph with the input `images`, as `write_graph` makes it.
        inputs: the inputs that determine ranges of activations, for each of two stages.
        normalise: the graph's normalisation of images with values in [0, 1].

    Raises:
        ModelError: the network has nothing that int8 speeds up, or can't be quantised.
        DataError: an input can't be used.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    model = onnx.load(file)
    types = {node.op_type for node in model.graph.node}
    if "Conv" not in types or "LayerNormalization" in types:
        raise ModelError(
            "int8 is for convolutions, and this network multiplies matrices, as transformers and "
            "ConvNeXt do; use --precision fp32"
        )
    excluded = [n.name for n in model.graph.node if n.op_type == "Conv" and not _is_backbone(n)]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._inputs = inputs("ranges")

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            images = next(self._inputs, None)
            return None if images is None else {"images": images}

    try:
        with quiet():
            _equalise(model, inputs)
            onnx.save(model, file)
            quantize_static(
                file,
                file,
                Reader(),
                op_types_to_quantize=_OPERATORS,
                nodes_to_exclude=excluded,
                per_channel=True,
                reduce_range=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                extra_options={
                    "CalibMovingAverage": True,  # means over the images
                    "TensorQuantOverrides": _input_range(model.graph, normalise),
                },
            )
    except AnomalyError:
        raise
    except Exception:  # of many types, about operators
        raise ModelError(
            "this network can't be quantised; use --precision fp32, or train with another backbone"
        ) from None
    model = onnx.load(file)
    _pool_unrounded(model.graph)
    del model.metadata_props[:]
    onnx.save(model, file)


def _pool_unrounded(graph: Any) -> None:
    """Make average pools read unrounded tensors if these may be negative.

    OpenVINO moves the second node of the pair that rounds a tensor behind the pool, and the zeros
    around an image then stand for −zero point × scale. Where nothing is negative the zero point is
    0, and the graph stays as it is.
    """
    from onnx import numpy_helper

    stored = {array.name: array for array in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        back = made_by.get(node.input[0]) if node.op_type == "AveragePool" else None
        if back is None or back.op_type != "DequantizeLinear":
            continue
        if numpy_helper.to_array(stored[back.input[2]]).any():
            node.input[0] = made_by[back.input[0]].input[0]


def _input_range(graph: Any, normalise: Normalisation) -> dict[str, list[dict[str, Any]]]:
    """Range of normalised images, for the tensor that the first convolution reads.

    Training images may all be dark, and a bright one would be cut off. Empty for a network that
    processes images otherwise first.
    """
    read = next(node for node in graph.node if node.op_type == "Conv").input[0]
    made_by = next((node.op_type for node in graph.node if read in node.output), None)
    if made_by not in (None, "Div"):
        return {}
    scales = normalise.mean, normalise.std
    dark, bright = ([(end - m) / s for m, s in zip(*scales, strict=True)] for end in (0, 1))
    return {read: [{"rmin": np.float32(min(dark)), "rmax": np.float32(max(bright))}]}


def _is_backbone(convolution: Any) -> bool:
    return _BACKBONE in convolution.input[1]


@dataclass(frozen=True)
class _Link:
    """A tensor of non-negative channels that one convolution writes and others read.

    Attributes:
        writer: the convolution; ReLU and pooling may lie between it and the tensor.
        tensor: the tensor's name.
        readers: all that use it, convolutions each.
    """

    writer: Any
    tensor: str
    readers: list[Any]


def _links(graph: Any) -> Iterator[_Link]:
    """The tensors of a graph whose channels may be scaled.

    Not where weights or biases are no constants, or are another node's as well: equal ones may be
    stored once.
    """
    stored = {array.name for array in graph.initializer}
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    for output in graph.output:  # other nodes use these
        users.pop(output.name, None)
    for writer in graph.node:
        if writer.op_type != "Conv" or not _is_backbone(writer):
            continue
        tensor = _behind_relu(writer.output[0], users)
        readers = users.get(tensor, [])
        if not readers or not all(map(_reads_all, readers)):
            continue
        scaled = [*writer.input[1:], *(reader.input[1] for reader in readers)]
        if all(name in stored and len(users[name]) == 1 for name in scaled):
            yield _Link(writer, tensor, readers)


def _behind_relu(tensor: str, users: Mapping[str, list[Any]]) -> str:
    """The output of ReLU and pooling of a tensor without other users; empty without a ReLU."""
    positive = False
    while len(after := users.get(tensor, [])) == 1 and after[0].op_type in ("Relu", "MaxPool"):
        positive |= after[0].op_type == "Relu"
        tensor = after[0].output[0]
    return tensor if positive else ""


def _reads_all(node: Any) -> bool:
    """Whether a node is a convolution of the backbone without groups."""
    if node.op_type != "Conv" or not _is_backbone(node):
        return False
    return all(value.i == 1 for value in node.attribute if value.name == "group")


def _equalise(model: Any, inputs: Inputs) -> None:
    """Scale channels so that their range is about that of the weights that read them.

    A factor is the root of both ratios, so that neither activations nor weights pay for the other:
    s = √(reach of the channel / reach of the weights that read it); what writes the channel is
    divided by it, what reads it multiplied.
    """
    from onnx import numpy_helper

    links = [*_links(model.graph)]
    if not links:
        return
    stored = {array.name: array for array in model.graph.initializer}
    arrays: dict[str, NDArray[np.float64]] = {}

    def array(name: str) -> NDArray[np.float64]:
        if name not in arrays:
            arrays[name] = numpy_helper.to_array(stored[name]).astype(np.float64)
        return arrays[name]

    for link, reach in zip(links, _reaches(model, links, inputs), strict=True):
        weights = np.max([np.abs(array(r.input[1])).max((0, 2, 3)) for r in link.readers], axis=0)
        factors = np.sqrt(_floored(reach) / _floored(weights))
        array(link.writer.input[1])[...] /= factors[:, None, None, None]
        for bias in link.writer.input[2:]:
            array(bias)[...] /= factors
        for reader in link.readers:
            array(reader.input[1])[...] *= factors[:, None, None]
    for name, made in arrays.items():
        stored[name].CopyFrom(numpy_helper.from_array(made.astype(np.float32), name))


def _floored(reach: NDArray[np.float64]) -> NDArray[np.float64]:
    highest = reach.max()
    return np.maximum(reach, _NARROWEST * highest if highest else 1.0)


def _reaches(model: Any, links: list[_Link], inputs: Inputs) -> list[NDArray[np.float64]]:
    """Largest values of each link's channels on all images, (C,) each."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    axes = numpy_helper.from_array(np.array([0, 2, 3]), "channel_axes")
    probe.graph.initializer.append(axes)
    for number, link in enumerate(links):
        name = f"reach_{number}"
        node = helper.make_node("ReduceMax", [link.tensor, axes.name], [name], keepdims=0)
        probe.graph.node.append(node)
        probe.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.intra_op_num_threads = get_threads()
    session = ort.InferenceSession(probe.SerializeToString(), options)
    reaches = [np.zeros(1) for _ in links]
    for images in inputs("channels"):
        made = session.run(None, {"images": images})
        reaches = [np.maximum(so_far, reach) for so_far, reach in zip(reaches, made, strict=True)]
    return reaches
