"""Which packages are installed; everything else is in pyproject.toml.

configs/ lies beside the package and is installed inside it, which pyproject.toml can't say without
naming each package.
"""

from setuptools import find_namespace_packages, setup

CODE = find_namespace_packages(include=["anomaly", "anomaly.*"], exclude=["*.__pycache__"])

setup(
    packages=[*CODE, "anomaly.configs", "anomaly.configs.base"],
    package_dir={"anomaly.configs": "configs"},
)
