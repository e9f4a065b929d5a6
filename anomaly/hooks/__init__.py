"""Watch and change what flows through the layers of any `nn.Module`; nothing stays registered.

`capture` keeps what layers put out, `HookSet` runs your own functions, `resolve` and `match` find
layers by name, `live_hooks` counts what is registered.
"""

from anomaly.hooks.capture import Capture, capture
from anomaly.hooks.hook_set import HookSet
from anomaly.hooks.paths import live_hooks, match, resolve

__all__ = ["Capture", "HookSet", "capture", "live_hooks", "match", "resolve"]
