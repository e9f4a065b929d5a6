"""`anomaly region` as a script: python scripts/region.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["region", *sys.argv[1:]]))
