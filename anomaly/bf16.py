"""Whether bfloat16, with its 8 significant bits, is quicker here than float32."""

from __future__ import annotations

import torch


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 faster than float32.

    On a CPU both have to be there: the processor's instructions, and oneDNN's leave to use them,
    which ONEDNN_MAX_CPU_ISA takes away.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    found: dict[str, object] = read()
    if not any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16")):
        return False
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
