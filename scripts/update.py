"""`anomaly update` as a script: python scripts/update.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["update", *sys.argv[1:]]))
