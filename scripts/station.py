"""`anomaly station` as a script: python scripts/station.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["station", *sys.argv[1:]]))
