"""Look at a layer's inputs before it runs, and change them."""

import torch
from torch import randn
from torchvision.models import resnet18

from anomaly.hooks import HookSet

model = resnet18(weights=None).eval()
images = randn(2, 3, 64, 64)


def add_noise(module, inputs, sigma, generator):
    (x,) = inputs
    return x + sigma * torch.randn(x.shape, generator=generator)


plain = model(images)
with HookSet(model) as hooks:
    hooks.forward_pre("layer2", add_noise, sigma=0.1, generator=torch.manual_seed(0))
    noisy = model(images)
print(f"noise before layer2 moves the logits by {(noisy - plain).abs().mean():.4f}")
assert not noisy.equal(plain)
assert model(images).equal(plain)
