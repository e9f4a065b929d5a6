"""`anomaly export` as a script: python scripts/export.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
