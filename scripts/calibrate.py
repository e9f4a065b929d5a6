"""Change a model's thresholds without training it again; the same as `anomaly calibrate`."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
