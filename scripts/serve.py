"""`anomaly serve` as a script: python scripts/serve.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
