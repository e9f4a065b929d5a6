"""Tables as CSV files (RFC 4180): the one writer of them, and the way back.

A spreadsheet takes a cell that begins with `=`, `+`, `-` or `@` for a formula and runs it, and
file names may begin like that. Such a text gets an apostrophe in front, and so does one that
begins with an apostrophe itself: a reader that drops one leading apostrophe from each text has
the true name back. Numbers stay as they are.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

# Spreadsheets skip blanks before a formula; a tab or line break can lead into the next cell.
_GUARDED = re.compile(r"'|[\t\r\n]|\s*[=+\-@]")
# Beyond what RFC 4180 demands: whatever some reader takes for the end of a line.
_QUOTED = re.compile('[,";\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]|^\\s|\\s$')


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as lines of CSV: None is an empty cell, floats have all their digits."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows)


def csv_rows(text: str) -> list[list[str]]:
    """The cells of such lines, texts without their apostrophes.

    Raises:
        ValueError: these aren't lines of CSV.
    """
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [[cell.removeprefix("'") for cell in row] for row in rows]
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _cell(value: object) -> str:
    if not isinstance(value, str):
        return "" if value is None else repr(value)
    text = f"'{value}" if _GUARDED.match(value) else value
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text
