"""`anomaly explain` as a script: python scripts/explain.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["explain", *sys.argv[1:]]))
