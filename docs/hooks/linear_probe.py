"""Tell two kinds of defect apart with a linear classifier on saved features."""

from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneOut, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from anomaly.cli import main
from anomaly.sample_data import write_sample_data

fabric = Path("data/sample/woven_fabric")  # what `anomaly demo` makes
if not fabric.is_dir():
    write_sample_data(Path("sample"), products=["woven_fabric"], n_train=1, n_good=1)
    fabric = Path("sample/woven_fabric")

# Save the features once: `anomaly features --backbone timm/tf_efficientnet_lite2 …`.
folders = [str(fabric / "test" / kind) for kind in ("hole", "oil_stain")]
network = ["--backbone", "timm/tf_efficientnet_lite2", "--layers", "blocks[4]"]
done = main(["features", *network, "--input", *folders, "--output", "features.npz", "--overwrite"])
assert done == 0

# Each image in turn is named by a probe that was trained on the others.
saved = np.load("features.npz")
kinds = [Path(path).parent.name for path in saved["paths"]]
probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
rightly = cross_val_score(probe, saved["blocks.4"], kinds, cv=LeaveOneOut())
print(f"{rightly.sum():.0f} of {len(kinds)} defects named rightly")
assert rightly.sum() >= 10
