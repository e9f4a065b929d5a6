"""`anomaly manifest` as a script: python scripts/manifest.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["manifest", *sys.argv[1:]]))
