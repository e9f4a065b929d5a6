"""`anomaly sample-data` as a script: python scripts/sample_data.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["sample-data", *sys.argv[1:]]))
