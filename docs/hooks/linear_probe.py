"""Tell two kinds of defect apart with a linear classifier on saved features."""

from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneOut, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from anomaly.cli import main
from anomaly.desk.demo import write_sample_data

plates = Path("data/sample/brushed_plate")  # what `anomaly demo` makes
if not plates.is_dir():
    plates = Path("sample")
    write_sample_data(plates, n_train=1, n_good=1)

# Save the features once: `anomaly features --backbone timm/tf_efficientnet_lite2 …`.
folders = [str(plates / "test" / kind) for kind in ("dent", "stain")]
network = ["--backbone", "timm/tf_efficientnet_lite2", "--layers", "blocks[4]"]
done = main(["features", *network, "--input", *folders, "--output", "features.npz", "--overwrite"])
assert done == 0

# Each image in turn is named by a probe that was trained on the others.
saved = np.load("features.npz")
kinds = [Path(path).parent.name for path in saved["paths"]]
probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
rightly = cross_val_score(probe, saved["blocks.4"], kinds, cv=LeaveOneOut())
print(f"{rightly.sum():.0f} of {len(kinds)} defects named rightly")
assert rightly.sum() >= 11
