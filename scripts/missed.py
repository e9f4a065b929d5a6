"""`anomaly missed` as a script: python scripts/missed.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["missed", *sys.argv[1:]]))
