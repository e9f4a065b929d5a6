"""What captured tensors cost, and how to bound it."""

import gc
import weakref

import torch
from torch import randn
from torchvision.models import resnet18

from anomaly.errors import LayerError
from anomaly.hooks import capture

model = resnet18(weights=None).eval()
images = randn(4, 3, 64, 64)

# With the graph, one captured tensor keeps alive everything that led to it; without, only itself.
for grad in (True, False):
    with capture(model, "layer4", grad=grad) as captured:
        captured.run(images)
        (kept,) = captured.pop().values()
    print(f"grad={grad}: the graph behind it is {'kept' if kept.grad_fn else 'gone'}")
    assert (kept.grad_fn is not None) == grad

# Reading empties: nothing of the last batch stays behind in the hooks.
with torch.no_grad(), capture(model, "layer1") as captured:
    captured.run(images)
    reference = weakref.ref(captured.pop()["layer1"])
    gc.collect()
    assert reference() is None

# A bound that is an error rather than a full memory: 4 x 64 x 16 x 16 float32 are 262,144 bytes.
with torch.no_grad(), capture(model, "layer1", keep=None, max_bytes=600_000) as captured:
    try:
        for _ in range(10):
            captured.run(images)
    except LayerError as error:
        print(error)
    else:
        raise AssertionError("ten batches fitted into the bound")
