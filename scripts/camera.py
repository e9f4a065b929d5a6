"""`anomaly camera` as a script: python scripts/camera.py --help."""

import sys

from anomaly.cli import main

if __name__ == "__main__":
    sys.exit(main(["camera", *sys.argv[1:]]))
