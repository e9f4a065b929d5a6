"""`anomaly start` as a script: python scripts/start.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["start", *sys.argv[1:]]))
