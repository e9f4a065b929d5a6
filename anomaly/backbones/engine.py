"""Exported graphs, the engines that run them, and a graph in the place of a network.

Torch isn't imported.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ModelError
from anomaly.imaging.loading import NetworkInput
from anomaly.runtime import get_threads

Array: TypeAlias = NDArray[Any]
# Images (B, 3, H, W) float32, or pixels (B, H, W, 3) uint8, -> the graph's outputs.
Run: TypeAlias = Callable[[Array], list[Array]]

# By an engine's name in `--to`: its title, the module to import, and the suffix of its graphs.
ENGINES = {
    "onnx": ("ONNX Runtime", "onnxruntime", ".onnx"),
    "openvino": ("OpenVINO", "openvino", ".xml"),
}


class Graph:
    """A graph in a file; the engine loads it at its first run. Threads may share it.

    Args:
        file: a graph that `anomaly.export` wrote.
        engine: a key of `ENGINES`.
        threads: processor threads to use, all calls together.

    Attributes:
        version: the engine's version.

    Raises:
        ModelError: the engine isn't installed. At a run: the engine can't read the graph or can't
            compute it on this machine, or the process was forked after an earlier run.
    """

    def __init__(self, file: Path, engine: str, threads: int) -> None:
        self.file, self.engine = file, engine
        self._threads = max(1, threads)
        self._compiling, self._process = Lock(), os.getpid()  # the process that compiles
        self._compiled: dict[int, Run] = {}  # by number of calls at the same time
        module = import_engine(engine, f"{file.parent} was exported for")
        self.version = str(module.__version__).partition("-")[0]

    def __call__(self, images: Array) -> list[Array]:
        """Outputs of the graph for a batch of images.

        Args:
            images: (B, 3, H, W) float32 RGB in [0, 1]; for a graph from pixels (B, H, W, 3) uint8.
        """
        images = np.ascontiguousarray(images)
        # A thread limited to one processor thread is one of several that call at the same time; any
        # other thread gets all processor threads for its call.
        run = self._compiled_for(self._threads if get_threads() == 1 else 1)
        try:
            return run(images)
        except Exception:  # each engine has its own family of errors
            shape = " × ".join(map(str, images.shape))
            raise ModelError(
                f"{self.file} can't be computed by {ENGINES[self.engine][0]} {self.version} on "
                f"this machine for a batch of {shape}; try smaller "
                "images or a smaller batch_size, or export the model for another engine"
            ) from None

    def _compiled_for(self, streams: int) -> Run:
        """The graph as a function, compiled once for each number of calls at the same time."""
        if self._compiled and self._process != os.getpid():
            raise ModelError(
                f"{self.file.parent} was used before this process was forked, and the threads of "
                f"{ENGINES[self.engine][0]} exist only in the old process; use it in the new "
                "process only, or start processes by multiprocessing.get_context('spawn')"
            )
        with self._compiling:
            self._process = os.getpid()
            if streams not in self._compiled:
                compiler = _onnx if self.engine == "onnx" else _openvino
                try:
                    self._compiled[streams] = compiler(self.file, self._threads, streams)
                except Exception:  # each engine has its own family of errors
                    raise ModelError(
                        f"{self.file} can't be loaded by {ENGINES[self.engine][0]} {self.version}; "
                        "export the model again with this version"
                    ) from None
            return self._compiled[streams]


def import_engine(engine: str, message_start: str) -> Any:
    """The module of an engine: `onnxruntime` or `openvino`.

    Args:
        engine: a key of `ENGINES`.
        message_start: the error message up to the engine's name, such as "m was exported for".

    Raises:
        ModelError: the engine isn't installed.
    """
    name, module, _ = ENGINES[engine]
    # Importing OpenVINO also imports its converter, which writes an id for its statistics into the
    # user's home folder. None makes the import of this module fail, and no id is written.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        return import_module(module)
    except ImportError:
        raise ModelError(
            f"{message_start} {name}, which isn't installed: pip install 'anomaly[{engine}]'"
        ) from None


def _onnx(file: Path, threads: int, streams: int) -> Run:
    """A graph as a function, in ONNX Runtime; `streams` calls at a time share `threads`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads // streams
    options.log_severity_level = 4  # fatal errors only: others are raised
    # Threads that wait in a loop would take the cores from those that decode.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    graph = file.read_bytes()  # ONNX Runtime opens no path that isn't UTF-8
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: list(session.run(None, {name: images}))


@contextmanager
def _signal_stack_restored() -> Iterator[None]:
    """At the end of the block, give this thread its stack for signal handlers back.

    On processors with AMX, OpenVINO replaces it by one with room for the registers alone: Python's
    handlers overflow it, and Ctrl-C ends the process by a segmentation fault.
    """
    if sys.platform != "linux":
        yield
        return
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # more than a `stack_t` takes
    libc.sigaltstack(None, before)
    try:
        yield
    finally:
        libc.sigaltstack(before, None)


def _openvino(file: Path, threads: int, streams: int) -> Run:
    """A graph as a function, in OpenVINO; `streams` calls at a time share `threads`."""
    import openvino

    with _signal_stack_restored():
        compiled = openvino.Core().compile_model(
            file,
            "CPU",
            {
                # Otherwise OpenVINO computes in bf16 where the processor has it.
                "INFERENCE_PRECISION_HINT": "f32",
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": streams,
                "ENABLE_CPU_PINNING": False,  # other processes decode on these cores
                # Overwriting a mapped file would crash the process.
                "ENABLE_MMAP": False,
            },
        )
    free: SimpleQueue[Any] = SimpleQueue()  # requests that no call is using

    def run(images: Array) -> list[Array]:
        try:
            request = free.get_nowait()
        except Empty:
            request = compiled.create_infer_request()
        # Copied, because the request's next run overwrites its outputs.
        outputs = [np.array(values) for values in request.infer([images]).to_tuple()]
        free.put(request)
        return outputs

    return partial(_first_alone, run)


def _first_alone(run: Run, images: Array) -> list[Array]:
    """Outputs of a graph; until the first run in this process has ended, no other one begins.

    OpenVINO's first run holds its own set-up lock and waits for Python's lock. A second run in
    another thread would hold Python's lock and wait for the set-up: a deadlock.
    """
    if _has_run.is_set():
        return run(images)
    with _first_run:
        results = run(images)
        _has_run.set()
    return results


_first_run, _has_run = Lock(), Event()  # held during the first run; set once it has ended


_MAX_BATCH = 2  # larger batches are no faster with any engine; eight images take twice the memory


@dataclass(frozen=True, eq=False)
class ExportedNetwork:
    """A graph from images to patch embeddings, used like an `Embedder` and its extractor.

    Threads may share one.

    Attributes:
        graph: the graph from images (B, 3, H, W) in [0, 1] to embeddings (B, h, w, D).
        strides: network pixels between neighbouring positions of each hooked layer.
        patch: side of the patches that a transformer cuts images into; None for other networks.
    """

    graph: Graph
    strides: tuple[int, ...]
    patch: int | None = None
    precision: ClassVar = "fp32"

    @property
    def engine(self) -> str:
        """The engine that computes: a key of `ENGINES`."""
        return self.graph.engine

    @property
    def network(self) -> Any:
        """No network: an exported model has none.

        Raises:
            ModelError: always; names the model folder to use.
        """
        raise ModelError(
            f"{self.graph.file.parent} is an exported model, which has verdicts and no layers; use "
            "the model folder that it was exported from"
        )

    def __call__(self, batch: Sequence[NetworkInput]) -> NDArray[np.float32]:
        """Patch embeddings (B, h, w, D) of images of one size."""
        return self._run(np.stack([item.pixels for item in batch]).transpose(0, 3, 1, 2))

    def max_batch_size(self, wanted: int) -> int:
        """Images in a batch: the number wanted, at most `_MAX_BATCH`."""
        return min(wanted, _MAX_BATCH)

    def inference_mode(self) -> AbstractContextManager[Any]:
        """A context that does nothing: an exported network has no gradients."""
        return nullcontext()

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(h, w) of the patches of a network input of (H, W) pixels; computes a black image."""
        height, width = self._run(np.zeros((1, 3, *size), np.float32)).shape[1:3]
        return height, width

    def _run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        # Image by image: as fast as a batch, in a fraction of its memory.
        return np.concatenate([self.graph(image[None])[0] for image in images])
