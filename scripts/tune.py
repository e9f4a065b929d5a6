"""`anomaly tune` as a script: python scripts/tune.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
