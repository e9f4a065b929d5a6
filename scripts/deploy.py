"""`anomaly deploy` as a script: python scripts/deploy.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["deploy", *sys.argv[1:]]))
