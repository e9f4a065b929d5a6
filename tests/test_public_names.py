"""What `import anomaly` promises."""

import subprocess
import sys

import anomaly


def test_eleven_public_names_and_no_more() -> None:
    assert sorted(anomaly.__all__) == [
        "AnomalyDetector",
        "AnomalyError",
        "Config",
        "ImageError",
        "Prediction",
        "evaluate",
        "fit",
        "load",
        "load_config",
        "open_dataset",
        "tune",
    ]
    for name in anomaly.__all__:
        assert getattr(anomaly, name).__module__.startswith("anomaly.")
    assert not hasattr(anomaly, "surprise")


def test_importing_and_decoding_load_no_torch() -> None:
    code = (
        "import sys, anomaly, anomaly.datasets\n"
        "import anomaly.imaging.loading, anomaly.maps.heatmap\n"
        "assert not {'torch', 'torchvision', 'faiss', 'sklearn', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
