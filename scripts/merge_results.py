"""`anomaly merge-results` as a script: python scripts/merge_results.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["merge-results", *sys.argv[1:]]))
