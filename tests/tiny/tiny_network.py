"""A network of the tests' own, for all that any network will do for: `backbone.name: tiny`.

Processes that tests start get it by its entry point, as a user's own package would offer one.
"""

from torch import Tensor, nn

from anomaly.backbones.networks import Backbone


class Block(nn.Module):
    """Two convolutions and their batch norms beside a shortcut; halves the sides."""

    def __init__(self, inside: int, outside: int, stride: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))


class TinyNetwork(nn.Module):
    """A classifier with stages at strides 4, 8, 16 and 32."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = Block(8, 16)
        self.layer2 = Block(16, 24)
        self.layer3 = Block(24, 32)
        self.layer4 = Block(32, 48)
        self.fc = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


TINY = Backbone(TinyNetwork)
