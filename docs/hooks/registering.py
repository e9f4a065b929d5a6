"""Run a function of your own whenever a layer has run."""

from torch import nn, randn
from torchvision.models import resnet18

from anomaly.hooks import HookSet, match, resolve

model = resnet18(weights=None).eval()
images = randn(2, 3, 64, 64)


def show(module, inputs, output):
    print(f"{type(module).__name__}: {tuple(inputs[0].shape)} -> {tuple(output.shape)}")


with HookSet(model) as hooks:
    hooks.forward("layer1[-1]", show)
    model(images)

# Four ways to name layers, all of them as `HookSet`, `capture` and `match` take them.
assert resolve(model, "layer1[-1]")[0] == "layer1.1"
assert match(model, "layer1.1.conv1") == ["layer1.1.conv1"]
assert match(model, "layer*.0.conv?")[:2] == ["layer1.0.conv1", "layer1.0.conv2"]
assert match(model, "layer1.**")[-1] == "layer1.1.bn2"
assert len(match(model, nn.BatchNorm2d)) == 20

# What a hook returns takes the place of the layer's output.
with HookSet(model) as hooks:
    hooks.forward("layer4", lambda module, inputs, output: output * 0)
    silenced = model(images)
assert silenced.allclose(model.fc.bias.expand_as(silenced))
