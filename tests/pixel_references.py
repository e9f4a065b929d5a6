"""Pixel metrics computed slowly and plainly, and the images to compare them on."""

import itertools
import math

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pyaupro import PerRegionOverlap
from scipy.ndimage import gaussian_filter
from scipy.ndimage import label as scipy_label

from anomaly.evaluation.metrics import PixelAccumulator

NAMES = {"pixel_auroc", "pixel_ap", "pixel_f1_max", "aupro_30", "aupro_05", "lost_defect_share"}


def measured(images, max_bins=1 << 20):
    """The figures from binned scores."""
    accumulator = PixelAccumulator(max_bins)
    for anomaly_map, mask in images:
        accumulator.update(anomaly_map, mask)
    return accumulator.result()


def flat(images):
    """Inspected scores and labels of all images."""
    scores = np.concatenate([m.ravel() for m, _ in images])
    labels = np.concatenate([k.ravel() for _, k in images])
    seen = ~np.isnan(scores)
    return scores[seen], labels[seen]


def brute_force_aupro(images, limit):
    """Threshold by threshold, region by region, as the MVTec AD evaluation defines it."""
    regions, good = [], []
    for anomaly_map, mask in images:
        seen = ~np.isnan(anomaly_map)
        labels, count = scipy_label(mask, np.ones((3, 3)))
        regions += [anomaly_map[(labels == i + 1) & seen] for i in range(count)]
        good.append(anomaly_map[seen & ~mask])
    regions = [r for r in regions if r.size]
    good = np.concatenate(good)
    points = [(0.0, 0.0)] + [
        ((good >= t).mean(), np.mean([(r >= t).mean() for r in regions]))
        for t in np.unique(flat(images)[0])[::-1]
    ]
    total = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x1 <= limit:
            total += (x1 - x0) * (y0 + y1) / 2
        elif x0 < limit:
            y = y0 + (y1 - y0) * (limit - x0) / (x1 - x0)
            total += (limit - x0) * (y0 + y) / 2
    return total / limit


def published_aupro(images, limit):
    """Area under the curve of the data set's authors' own evaluation code, as pyaupro ships it.

    That code knows no uninspected pixels and wants maps of one size.
    """
    curve = PerRegionOverlap(reference_implementation=True)
    maps, masks = zip(*images, strict=True)
    curve.update(torch.from_numpy(np.stack(maps)), torch.from_numpy(np.stack(masks)))
    x, y = (values.numpy() for values in curve.compute())
    inside = x <= limit
    ends_at = np.interp(limit, x, y) if x[inside][-1] < limit else y[inside][-1]
    return np.trapezoid([*y[inside], ends_at], [*x[inside], limit]) / limit


def smooth_images(rng, good=6, defective=5, shape=(160, 190), dtype=np.float32):
    """Maps as a detector makes them, masks with several regions of unequal size."""
    images = []
    for i in range(good + defective):
        scores = gaussian_filter(rng.gamma(3.0, 1.0, shape), 1.0)
        mask = np.zeros(shape, bool)
        if i >= good:
            for size in (3, 9, 25):
                y, x = rng.integers(0, 130, 2)
                mask[y : y + size, x : x + size] = True
            scores[mask] += rng.gamma(6.0, 0.5, mask.sum())
        images.append((scores.astype(dtype), mask))
    return images


def images_of(*scores):
    """One to four small images of these scores, some of them not inspected, and their masks."""
    return st.lists(
        st.tuples(
            hnp.arrays(np.float32, (4, 5), elements=st.sampled_from([*scores, math.nan])),
            hnp.arrays(bool, (4, 5), elements=st.sampled_from([False, False, True])),
        ),
        min_size=1,
        max_size=4,
    )
