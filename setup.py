"""Which packages are installed; everything else is in pyproject.toml.

configs/ lies beside the package and is installed inside it, which pyproject.toml can't say without
naming each package.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["anomaly", "anomaly.*"]), "anomaly.configs"],
    package_dir={"anomaly.configs": "configs"},
)
