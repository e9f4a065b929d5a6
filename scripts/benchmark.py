"""`anomaly benchmark` as a script: python scripts/benchmark.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
