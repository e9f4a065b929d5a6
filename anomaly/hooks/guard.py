"""What every hook goes through: copies of a network get none, and nothing is changed in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from anomaly.errors import LayerError
from anomaly.hooks.nested import named_tensors

Hook = Callable[..., Any]


class Attached:
    """A hook as it stands in PyTorch's tables.

    A network that is copied or pickled while it is hooked takes along a hook that does nothing:
    whoever made this one removes it from the original alone.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._hook(*args)

    def __reduce__(self) -> tuple[type[Detached], tuple[()]]:
        return Detached, ()


class Detached:
    """What a copy of a network has in place of a hook."""

    def __call__(self, *_: Any) -> None:
        """Change nothing."""


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
