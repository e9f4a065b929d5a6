"""Where does a classifier look? One that tells specks from holes, trained here in seconds."""

import numpy as np
import torch
from PIL import Image
from torch import nn

from anomaly.explain.saliency import colored, grad_cam

generator = torch.manual_seed(0)
SPECK, HOLE, NOTHING = 0, 1, 2


def draw(kind, top, left):
    """A noisy image (3, 40, 40) with one mark of 12 x 12 pixels, or none."""
    image = 0.2 * torch.randn(3, 40, 40, generator=generator)
    y, x = torch.meshgrid(torch.arange(12) - 5.5, torch.arange(12) - 5.5, indexing="ij")
    disk = (x**2 + y**2 < 30).float()
    brightness = {SPECK: 1, HOLE: -1, NOTHING: 0}[kind]
    image[:, top : top + 12, left : left + 12] += brightness * disk
    return image


def batch(n):
    kinds = torch.randint(3, (n,), generator=generator)
    places = torch.randint(28, (n, 2), generator=generator)
    marks = zip(kinds.tolist(), places.tolist(), strict=True)
    return torch.stack([draw(kind, *place) for kind, place in marks]), kinds


model = nn.Sequential(
    *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
    *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
    *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, 3)),
)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(100):
    images, kinds = batch(32)
    loss = nn.functional.cross_entropy(model(images), kinds)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()

# Both marks in one picture: each class finds its own.
image = draw(SPECK, 4, 4) + draw(HOLE, 24, 26)
speck = grad_cam(model, image, "[7]", target_class=SPECK)
hole = grad_cam(model, image, "[7]", target_class=HOLE)
Image.fromarray(np.hstack([colored(speck), colored(hole)])).save("grad_cam.png")

top_left, bottom_right = np.s_[:20, :20], np.s_[20:, 20:]
print(f"speck: {speck[top_left].sum() / speck.sum():.0%} of the evidence at the speck")
print(f"hole: {hole[bottom_right].sum() / hole.sum():.0%} of the evidence at the hole")
assert speck[top_left].sum() > 0.6 * speck.sum()
assert hole[bottom_right].sum() > 0.6 * hole.sum()
