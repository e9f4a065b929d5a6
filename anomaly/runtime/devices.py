"""Where networks and searches are computed: the processor or a GPU, and what it is good at.

Imports torch only to ask for its devices: exported models are computed without it.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from anomaly.errors import AnomalyError
from anomaly.runtime.parallel import cores, imported_torch, wanted_threads

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Processor:
    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


# What stands for torch.device("cpu") where torch may be absent: with exported models.
CPU: torch.device = cast(Any, _Processor())


def device_of(device: str | torch.device) -> torch.device:
    """The device that is meant by `auto` (the GPU where there is one), `cpu`, `cuda` or by itself.

    Where this is what imports torch, torch computes with as many threads as the program, and with
    no more than there are processors for it.

    Raises:
        AnomalyError: there is no such device here.
    """
    first = imported_torch() is None
    import torch

    if first:
        torch.set_num_threads(wanted_threads() or min(torch.get_num_threads(), cores()))
    has_gpu = torch.cuda.is_available()
    name = str(device)
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    place = None
    with suppress(RuntimeError):
        place = torch.device(name)
    if place is None or place.type not in ("cpu", "cuda"):
        raise AnomalyError(f"device {name!r}: give 'auto', 'cpu' or 'cuda'")
    if place.type == "cuda" and not has_gpu:
        raise AnomalyError(f"device {device}: torch finds no usable GPU here; use cpu or auto")
    return place


def check_fork(device: torch.device) -> None:
    """See that a model's device still answers: a GPU doesn't answer a process that was forked.

    Raises:
        AnomalyError: the model was put on the GPU before the fork.
    """
    if device.type == "cuda":
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise AnomalyError(
                "the model was put on the GPU before this process was forked, which the GPU "
                "doesn't answer; load it in the new process, and start that by "
                "multiprocessing.get_context('spawn')"
            )


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 faster than float32.

    On a CPU both have to be there: the processor's instructions, and oneDNN's leave to use them,
    which ONEDNN_MAX_CPU_ISA takes away.
    """
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    instructions: dict[str, object] = read()
    if not any(bool(instructions.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16")):
        return False
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def release_memory() -> None:
    """Give free memory back to the system.

    Large arrays of many sizes that come and go leave gaps, which glibc keeps: without this, a
    process that reads a few thousand images ends up holding gigabytes of them. Takes some
    milliseconds.
    """
    # Only glibc has the call.
    if sys.platform.startswith("linux") and hasattr(c := ctypes.CDLL(None), "malloc_trim"):
        c.malloc_trim(0)


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes; 0 where the system can't say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
