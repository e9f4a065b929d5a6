"""`anomaly layers` as a script: python scripts/layers.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["layers", *sys.argv[1:]]))
