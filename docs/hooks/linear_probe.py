"""Tell two kinds of defect apart with a linear classifier on saved features."""

import csv

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torchvision.models import resnet18

from anomaly.hooks import capture

random = np.random.default_rng(0)


def defect(kind):
    """A grey, noisy surface (3, 96, 96) with a long scratch or a round spot."""
    surface = 0.2 * random.normal(size=(96, 96))
    y, x = np.mgrid[:96, :96] - random.uniform(30, 66, size=(2, 1, 1))
    angle = random.uniform(0, np.pi)
    scratch = np.abs(x * np.cos(angle) + y * np.sin(angle)) < 1.5
    surface[scratch if kind == "scratch" else x**2 + y**2 < 80] += 2
    return torch.from_numpy(surface).float().expand(3, -1, -1)


kinds = ["scratch", "spot"] * 60
images = torch.stack([defect(kind) for kind in kinds])

# Save one row of pooled features for each image, and which row belongs to which.
torch.manual_seed(0)
model = resnet18(weights=None).eval()  # with ImageNet weights it takes fewer images still
with torch.inference_mode(), capture(model, "layer2", stop=True) as captured:
    captured.run(images)
    np.save("features.npy", captured.pop()["layer2"].mean(dim=(2, 3)).numpy())
with open("index.csv", "w", newline="") as file:  # noqa: PTH123
    csv.writer(file).writerows(enumerate(kinds))

# The probe.
features = np.load("features.npy")
train, test = slice(0, 80), slice(80, None)
scale = features[train].std(axis=0) + 1e-6
probe = LogisticRegression(max_iter=1000).fit(features[train] / scale, kinds[train])
accuracy = probe.score(features[test] / scale, kinds[test])
print(f"{accuracy:.0%} of {len(kinds[test])} new defects named rightly")
assert accuracy > 0.9
