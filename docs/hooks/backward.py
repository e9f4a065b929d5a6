"""Gradients on their way back through a layer."""

import warnings

import torch
from torch import nn, randn
from torchvision.models import mobilenet_v2

from anomaly.hooks import HookSet

model = mobilenet_v2(weights=None).eval()
images = randn(1, 3, 64, 64, requires_grad=True)


def show(module, grad_input, grad_output, path):
    print(f"{path}: {grad_output[0].norm():.2e} came in, {grad_input[0].norm():.2e} goes on")


with HookSet(model) as hooks:
    hooks.backward("features[1]", show, "features.1")
    hooks.backward("features[2]", show, "features.2")
    model(images).sum().backward()

# Scale what flows on to the layers before.
(plain,) = torch.autograd.grad(model(images).sum(), images)
with HookSet(model) as hooks:
    hooks.backward("features[0]", lambda module, grad_input, grad_output: (grad_input[0] / 2,))
    (halved,) = torch.autograd.grad(model(images).sum(), images)
assert halved.allclose(plain / 2)


# Why not PyTorch's old register_backward_hook: it shows the last operation, not the module.
class TwoSteps(nn.Module):
    def forward(self, x):
        return (x * 3).exp()


x = torch.zeros(1, requires_grad=True)
steps = TwoSteps()
seen = []
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    handle = steps.register_backward_hook(lambda module, gi, go: seen.append(gi[0].item()))
    steps(x).backward()
    handle.remove()
with HookSet(steps) as hooks:
    hooks.backward("", lambda module, gi, go: seen.append(gi[0].item()))
    steps(x).backward()
assert seen == [1.0, 3.0]  # d exp(3x) / dx at 0 is 3; the old hook reports that of exp alone

# Why not PyTorch's register_full_backward_hook by itself: in-place layers break it.
handle = model.features[0][1].register_full_backward_hook(lambda *_: None)
try:
    model(images)
except RuntimeError as error:
    print(str(error).split(".")[0])
else:
    raise AssertionError("in-place layers no longer break PyTorch's hook")
handle.remove()
