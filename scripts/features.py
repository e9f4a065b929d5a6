"""`anomaly features` as a script: python scripts/features.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["features", *sys.argv[1:]]))
