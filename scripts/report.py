"""`anomaly report` as a script: python scripts/report.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
