"""`anomaly register` as a script: python scripts/register.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["register", *sys.argv[1:]]))
