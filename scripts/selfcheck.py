"""`anomaly selfcheck` as a script: python scripts/selfcheck.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["selfcheck", *sys.argv[1:]]))
