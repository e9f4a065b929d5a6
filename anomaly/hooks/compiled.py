"""Compiled code calls no hooks that are registered later: while there are any, it mustn't run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from anomaly.errors import LayerError


def refuse_compiled(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Make each compiled network that contains any of some layers raise where it is run.

    Hooks on these layers go unnoticed there; the network that was given to `torch.compile` stays
    as it is.

    Returns:
        Handles that let it run again.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    compiled = getattr(getattr(frames, "input_codes", None), "seen", None)
    if frames is None or compiled == []:
        return []  # nothing has run compiled, and the search below takes milliseconds
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    hooked = {id(module) for module in modules}
    return [
        network.register_forward_pre_hook(_refuse)
        for network in gc.get_referrers(kind)
        if isinstance(network, kind) and hooked & {id(module) for module in network.modules()}
    ]


def _refuse(network: nn.Module, _: Any) -> None:
    raise LayerError(
        "this network is compiled, and layers of it are hooked: compiled code doesn't see their "
        "hooks. Run the network that was given to torch.compile (`compiled._orig_mod(...)`, or "
        "`captured.run(...)` of a capture on it)"
    )
