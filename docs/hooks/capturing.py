"""Keep what layers put out."""

import torch
from torch import randn
from torchvision.models import mobilenet_v2

from anomaly.hooks import capture

model = mobilenet_v2(weights=None).eval()
images = randn(2, 3, 64, 64)

with torch.inference_mode(), capture(model, ["features[3]", "features[6]"], stop=True) as captured:
    captured.run(images)
    maps = captured.pop()
assert {path: tuple(m.shape) for path, m in maps.items()} == {
    "features.3": (2, 24, 16, 16),
    "features.6": (2, 32, 8, 8),
}

# As half precision, as NumPy, all calls of a layer that runs several times.
with torch.no_grad(), capture(model, "features[6]", dtype=torch.float16, keep=None) as captured:
    for image in images:
        captured.run(image[None])
    calls = captured.pop_calls()["features.6"]
    captured.run(images)
    array = captured.pop_numpy()["features.6"]
assert len(calls) == 2
assert str(array.dtype) == "float16"

# With the graph, so that an activation can stand in a loss: keep layer 6 sparse.
with capture(model, "features[6]", grad=True) as captured:
    logits = captured.run(images)
    loss = logits.square().mean() + 0.1 * captured.pop()["features.6"].abs().mean()
loss.backward()
