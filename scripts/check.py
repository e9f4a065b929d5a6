"""`anomaly check` as a script: python scripts/check.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
