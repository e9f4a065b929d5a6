"""`anomaly region`: a page on which polygons are drawn, for `image.region` of a config."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from anomaly.config.load import parse_config
from anomaly.files.writing import claim, write
from anomaly.report.page import region_page
from anomaly.scoring.build import decoding_of


def run(options: argparse.Namespace) -> int:
    """Write the page, and open it where somebody sits at the terminal."""
    declared = {} if options.bit_depth is None else {"bit_depth": options.bit_depth}
    settings = parse_config({"image": declared}, "--bit-depth").image
    output: Path = options.output.absolute()
    claim(output.parent, [output.name], overwrite=options.overwrite)
    write(output, region_page(options.image, decoding_of(settings)))
    print(f"draw in {output}, then copy the lines it shows into your config")
    if sys.stdout.isatty():
        webbrowser.open(output.as_uri())
    return 0
