"""A folder of several products: a model for each, and a table over all of them.

python examples/several_products.py                # two generated products, as a trial
python examples/several_products.py my_products    # folders with good/ and defect/ in each
"""

from __future__ import annotations

import sys
from pathlib import Path

import anomaly
from anomaly.sample_data import write_sample_data

SETTINGS = {"backbone": {"name": "timm/tf_efficientnet_lite2"}, "image": {"area": 128}}


def learn_all(folder: Path, layout: str, output: Path) -> dict[str, float]:
    """Learn, test and report each product; the image AUROC of each.

    A product that can't be used is named with the reason, and the others go on.
    """
    found: dict[str, float] = {}
    products = sorted(path for path in folder.iterdir() if path.is_dir())
    print(f"{'product':20} {'AUROC':>7} {'false rejects':>14} {'escapes':>8}")
    for product in products:
        try:
            dataset = anomaly.open_dataset(layout, folder, product.name)
            detector = anomaly.fit(dataset, SETTINGS)
            detector.save(output / product.name / "model", overwrite=True)
            evaluation = anomaly.evaluate(detector, dataset)
        except anomaly.AnomalyError as error:
            print(f"{product.name:20} {error}")
            continue
        evaluation.report(output / product.name / "report", overwrite=True)
        found[product.name] = evaluation.metrics["image_auroc"]
        verdicts = evaluation.verdicts
        rejects, escapes = verdicts.good.reject, verdicts.defective.good
        auroc = found[product.name]  # None without defects
        shown = "–" if auroc is None else f"{auroc:.4f}"
        print(f"{product.name:20} {shown:>7} {rejects:14} {escapes:8}")
    return found


def main(arguments: list[str]) -> dict[str, float]:
    """The folder given, or generated products."""
    if arguments:
        if not Path(arguments[0]).is_dir():
            sys.exit(f"{arguments[0]} isn't a folder; give the one with a folder for each product")
        return learn_all(Path(arguments[0]), "good_defect", Path("products"))
    write_sample_data(Path("trial"), n_train=24, n_good=6, n_defect=5, overwrite=True)
    return learn_all(Path("trial"), "mvtec", Path("products"))


if __name__ == "__main__":
    main(sys.argv[1:])
