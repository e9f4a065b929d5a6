"""Whether bfloat16, with its 8 significant bits, is quicker here than float32."""

from __future__ import annotations

import torch


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    found: dict[str, object] = read()
    return any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))
