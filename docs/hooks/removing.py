"""Hooks go when `with` ends, whatever happens inside."""

from torch import randn
from torchvision.models import resnet18

from anomaly.hooks import HookSet, capture, live_hooks

model = resnet18(weights=None).eval()


def fail(module, inputs, output):
    raise ValueError("something went wrong")


try:
    with HookSet(model) as hooks, capture(model, "layer1"):
        hooks.forward("layer*", fail)
        assert live_hooks(model) == 5
        model(randn(1, 3, 64, 64))
except ValueError as error:
    print(error)
assert live_hooks(model) == 0

# One early, and all of a set without `with`.
hooks = HookSet(model)
first, second = hooks.forward(["layer1", "layer2"], fail)
first.remove()
assert live_hooks(model) == 1
hooks.remove()
assert live_hooks(model) == 0
