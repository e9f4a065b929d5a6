"""`anomaly merge` as a script: python scripts/merge.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
