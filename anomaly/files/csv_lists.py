"""Lists of images as spreadsheets save them: CSV by comma, semicolon or tab, UTF-8 or not."""

from __future__ import annotations

import codecs
import csv
import difflib
import io
from collections.abc import Iterator, Sequence

from anomaly.errors import DataError

Rows = Iterator[tuple[int, dict[str, str]]]

_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def marked_encoding(data: bytes) -> tuple[str, bytes] | None:
    """The encoding that a byte order mark at the start stands for, and the rest; None without."""
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            return encoding, data.removeprefix(mark)
    return None


def header_of(first_line: str, columns: Sequence[str]) -> tuple[list[str], str]:
    """The cells of a list's first line, and the delimiter by which most columns are known ones."""

    def split(delimiter: str) -> list[str]:
        cells = next(csv.reader([first_line], delimiter=delimiter), [])
        return [cell.strip() for cell in cells]

    best = max(_DELIMITERS, key=lambda d: (len(set(split(d)) & set(columns)), len(split(d))))
    return split(best), best


def read_rows(data: bytes, name: str, columns: Sequence[str], needed: Sequence[str]) -> Rows:
    """(line, row) for each row of a CSV list.

    Args:
        data: the file's bytes: UTF-8, UTF-16 with a mark, or Windows-1252, as Excel saves them.
        name: of the list, for messages.
        columns: the columns that are known. Others are left alone, misspelt ones refused.
        needed: those of them that have to be there.

    Raises:
        DataError: no text, no CSV, a column that is missing or misspelt, a row of too many cells.
    """
    lines = io.StringIO(text_of(data, name), newline="")
    try:
        header, delimiter = header_of(lines.readline(), columns)
        _check_columns(name, header, columns, needed)
        reader = csv.DictReader(lines, header, restval="", strict=True, delimiter=delimiter)
        for row in reader:
            if None in row:
                raise DataError(
                    f"{name} line {reader.line_num + 1} has more cells than the header; put paths "
                    f"that hold {_DELIMITERS[delimiter]} in quotes"
                )
            yield reader.line_num + 1, row
    except csv.Error:
        raise DataError(
            f"{name} isn't a CSV file: a quote is never closed, or stands inside a cell"
        ) from None


def text_of(data: bytes, name: str) -> str:
    """A list's text, as `read_rows` takes it.

    Raises:
        DataError: it is no text in any of these encodings.
    """
    encoding, rest = marked_encoding(data) or ("utf-8", data)
    for each in (encoding, "cp1252") if encoding == "utf-8" else (encoding,):
        try:
            text = rest.decode(each)
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return text
    raise DataError(f"{name} isn't text in UTF-8, UTF-16 or Windows-1252; save it as CSV UTF-8")


def _check_columns(
    name: str, present: Sequence[str], columns: Sequence[str], needed: Sequence[str]
) -> None:
    absent = [column for column in columns if column not in present]
    for column in set(present) - set(columns):
        if close := difflib.get_close_matches(column, absent, 1, 0.8):
            raise DataError(f"{name}: column {column!r} isn't known; did you mean {close[0]!r}?")
    if missing := [column for column in needed if column not in present]:
        raise DataError(
            f"{name} lacks the column {missing[0]!r}: its first line is "
            f"{', '.join(map(repr, present)) or 'empty'}, and must name the columns "
            f"{', '.join(columns)}"
        )
