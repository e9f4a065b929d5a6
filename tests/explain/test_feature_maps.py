from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from sklearn.decomposition import PCA
from torch import nn

from anomaly.errors import LayerError
from anomaly.explain.saliency import feature_map_picture, feature_map_pictures, pca_rgb
from anomaly.hooks import live_hooks


def test_pca_colours_are_scikit_learns_components() -> None:
    values = np.random.default_rng(0).normal(size=(8, 9, 7)) * np.arange(1, 9)[:, None, None]
    expected = PCA(3).fit_transform(values.reshape(8, -1).T)
    got = pca_rgb(values).reshape(-1, 3).astype(float)
    for i in range(3):
        assert abs(np.corrcoef(got[:, i], expected[:, i])[0, 1]) > 0.99
    for channels in (1, 2, 5):  # components that a map lacks are grey
        ramp = np.broadcast_to(np.arange(12.0).reshape(3, 4), (channels, 3, 4))
        picture = pca_rgb(ramp)
        assert (picture[..., 1:] == 128).all()
        assert (picture[..., 0].min(), picture[..., 0].max()) == (0, 255)
        assert (pca_rgb(np.ones((channels, 3, 4))) == 128).all()


def test_pictures_show_image_pca_and_channels() -> None:
    torch.manual_seed(0)
    network = torchvision.models.mobilenet_v2(weights=None).eval()
    pictures = feature_map_pictures(network, torch.randn(3, 64, 96), ["features[2]", "features.6"])
    assert list(pictures) == ["features.2", "features.6"]
    for picture in pictures.values():
        assert picture.dtype == np.uint8
        # 18 tiles of 80 x 120 under a caption, 6 in a row, below the heading.
        assert picture.shape == (18 + 3 * (80 + 18 + 4), 6 * 124 + 4, 3)
    assert live_hooks(network) == 0


def test_the_most_active_channels_are_shown_first() -> None:
    activity = np.array([1.0, -3.0, 2.0, 0.5])
    values = activity[:, None, None] * np.linspace(0.5, 1, 16).reshape(4, 4)
    two = feature_map_picture(values, "a", n_channels=2)
    ordered = feature_map_picture(values[[1, 2, 0, 3]], "a", n_channels=2)
    np.testing.assert_array_equal(two[36:, 128:], ordered[36:, 128:])  # below names, beside the PCA


def test_what_is_no_feature_map_is_told() -> None:
    values = np.ones((2, 4, 4))
    values[1, 2, 3] = np.nan
    with pytest.raises(LayerError, match="layer3: the feature map holds NaN or infinite values"):
        feature_map_picture(values, "layer3")
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(LayerError, match=r"'1' puts out shape \(1, 3\), not a feature map"):
        feature_map_pictures(network, torch.zeros(3, 2, 2), ["1"])
    assert live_hooks(network) == 0
