"""`anomaly feedback` as a script: python scripts/feedback.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["feedback", *sys.argv[1:]]))
