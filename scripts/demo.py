"""`anomaly demo` as a script: python scripts/demo.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
