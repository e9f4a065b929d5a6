"""Hooks return what they change; one that changes a tensor in place is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from anomaly.errors import LayerError
from anomaly.hooks.nested import named_tensors

Hook = Callable[..., Any]


def unmodified(hook: Hook) -> Hook:
    """The hook, watched: a tensor that it was shown must be as it was.

    Other layers may hold the same tensor (a residual connection, a ReLU that keeps its output for
    the backward pass, autograd's own sums). Tensors made under `torch.inference_mode` don't count
    their changes and can't be watched.

    Raises:
        LayerError: when the hook has run and changed one.
    """

    @wraps(hook)
    def guarded(*args: Any) -> Any:
        tensors = [t for _, t in named_tensors(args, "") if not t.is_inference()]
        versions = [tensor._version for tensor in tensors]
        result = hook(*args)
        if versions != [tensor._version for tensor in tensors]:
            raise LayerError(
                f"the hook {_name(hook)} changed a tensor in place, which other layers may use as "
                "well: return the new value instead"
            )
        return result

    return guarded


def _name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
