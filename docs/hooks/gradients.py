"""Watch gradients over training steps, and clip them."""

import torch
from torch import nn

from anomaly.explain.saliency import GradientMonitor
from anomaly.hooks import HookSet

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(6)]
model = nn.Sequential(*layers, nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

with GradientMonitor(model) as monitor, HookSet(model) as hooks:
    for parameter in model.parameters():
        hooks.accumulated(parameter, nn.utils.clip_grad_norm_, 1.0)
    for _ in range(30):
        x = torch.randn(64, 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x.sum(dim=1) > 0).long()).backward()
        optimizer.step()
        monitor.step()

record = monitor.record()
first, last = record.norms.mean(axis=0)[[0, -1]]
print(f"mean norm: {first:.1e} in {record.layers[0]}, {last:.1e} in {record.layers[-1]}")
assert first < last / 100  # six sigmoids in a row: the gradient vanishes
assert not record.nonfinite.any()
