"""What the figures of reports mean, in a sentence or two for whoever hasn't met them."""

from __future__ import annotations

from html import escape

GLOSSARY = {
    "image_auroc": "Area under the ROC curve of the image scores: the chance that a defective "
    "image scores higher than a good one. 1 is perfect, 0.5 is guessing.",
    "image_ap": "Average precision of the image scores: precision (the share of flagged images "
    "that are defective) averaged over all recalls. 1 is perfect; guessing gets the share of "
    "defective images in the test split.",
    "image_f1_max": "The highest F1 score (harmonic mean of precision and recall) that any "
    "threshold reaches on these very images. A threshold chosen without them reaches less.",
    "recall_at_frr_0.01": "The share of defective images that are found by a threshold which "
    "rejects at most 1 % of the good test images.",
    "recall_at_frr_0.05": "The share of defective images that are found by a threshold which "
    "rejects at most 5 % of the good test images.",
    "pixel_auroc": "Area under the ROC curve of the anomaly maps' pixels: the chance that a "
    "defective pixel has a higher value than a defect-free one. Nearly all pixels are free of "
    "defects, so it is close to 1 even where many are marked wrongly.",
    "pixel_ap": "Average precision of the anomaly maps' pixels: the share of marked pixels that "
    "are defective, averaged over all recalls. Stricter than pixel AUROC, as it doesn't count "
    "the many defect-free pixels that are rightly left unmarked.",
    "pixel_f1_max": "The highest F1 score (harmonic mean of precision and recall) of the pixels "
    "that any one threshold on the anomaly maps reaches.",
    "aupro_30": "Area under the per-region overlap curve: how much of each defect region is "
    "marked, each region counting the same whatever its size, averaged over false-positive rates "
    "from 0 to 30 % of the defect-free pixels. 1 is perfect.",
    "aupro_05": "AUPRO up to a false-positive rate of 5 % only, as MVTec AD 2 asks for: how well "
    "regions are outlined while hardly anything else is marked. 1 is perfect.",
    "aupimo": "Area under the per-image overlap curve: how much of the defects in an image is "
    "marked by thresholds so high that only 1 in 100,000 to 1 in 10,000 pixels of good images is "
    "marked, averaged over these thresholds (on a logarithmic scale) and over defective images. "
    "1 is perfect; it is the strictest of these figures.",
}


def term(key: str, title: str) -> str:
    """A figure's name as HTML that explains itself: under the mouse, and at a press or a key."""
    about, spot = escape(GLOSSARY[key]), escape(f"about-{key}")
    return (
        f'<button class="term" type="button" popovertarget="{spot}" title="{about}">'
        f'{escape(title)}</button><span id="{spot}" popover class="about">'
        f"<b>{escape(title)}</b>{about}</span>"
    )
