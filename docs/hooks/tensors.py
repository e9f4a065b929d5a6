"""Watch and change the gradient of a single tensor."""

import torch
from torch import randn
from torchvision.models import resnet18

from anomaly.hooks import HookSet, capture, live_hooks

model = resnet18(weights=None).eval()
images = randn(2, 3, 64, 64)

# A parameter: twice the gradient for the last layer.
model(images).square().mean().backward()
plain = model.fc.weight.grad.clone()
model.zero_grad()
with HookSet(model) as hooks:
    hooks.tensor(model.fc.weight, torch.mul, 2.0)
    model(images).square().mean().backward()
assert model.fc.weight.grad.allclose(2 * plain)

# An activation: capture it with its graph, then hook it.
norms = []
with HookSet(model) as hooks, capture(model, "layer3", grad=True) as captured:
    loss = captured.run(images).square().mean()
    hooks.tensor(captured.pop()["layer3"], lambda grad: norms.append(grad.norm().item()))
    loss.backward()
print(f"norm of the loss's gradient at layer3: {norms[0]:.2e}")
assert live_hooks(model) == 0
