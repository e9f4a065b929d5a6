"""`anomaly drift` as a script: python scripts/drift.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["drift", *sys.argv[1:]]))
