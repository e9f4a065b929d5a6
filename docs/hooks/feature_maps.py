"""Draw what a layer makes of an image."""

from pathlib import Path

import torch
from PIL import Image
from torchvision.models import resnet18

from anomaly.explain.saliency import feature_map_pictures

model = resnet18(weights=None).eval()
y, x = torch.meshgrid(torch.linspace(-1, 1, 96), torch.linspace(-1, 1, 128), indexing="ij")
ring = torch.exp(-40 * ((x**2 + y**2).sqrt() - 0.6) ** 2)
image = torch.stack([ring, ring * y, ring * x])

pictures = feature_map_pictures(model, image, ["layer1", "layer2"], n_channels=10)
for layer, picture in pictures.items():
    Image.fromarray(picture).save(f"{layer}.png")
assert Path("layer1.png").is_file()
