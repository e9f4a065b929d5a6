"""`anomaly infer` as a script: python scripts/infer.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["infer", *sys.argv[1:]]))
