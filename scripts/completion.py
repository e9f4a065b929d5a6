"""`anomaly completion` as a script: python scripts/completion.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["completion", *sys.argv[1:]]))
