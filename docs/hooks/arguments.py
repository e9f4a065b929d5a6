"""Hand a hook more than PyTorch gives it."""

from torch import nn, randn
from torchvision.models import resnet18

from anomaly.hooks import HookSet, match

model = resnet18(weights=None).eval()
means = {}


def note_mean(module, inputs, output, path, *, into):
    into[path] = output.mean().item()


with HookSet(model) as hooks:
    for path in match(model, "layer?"):
        hooks.forward(path, note_mean, path, into=means)
    model(randn(1, 3, 64, 64))
assert list(means) == ["layer1", "layer2", "layer3", "layer4"]

# Keyword arguments of the layer itself come with `with_kwargs=True`.
attention = nn.MultiheadAttention(8, 2, batch_first=True)
asked = []


def note_keywords(module, inputs, kwargs, output):
    asked.append(sorted(kwargs))


with HookSet(attention) as hooks:
    hooks.forward("", note_keywords, with_kwargs=True)  # "" is the network itself
    tokens = randn(1, 5, 8)
    attention(tokens, tokens, tokens, need_weights=False)
assert asked == [["need_weights"]]
