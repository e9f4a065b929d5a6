"""`python -m anomaly` is the command line."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main())
