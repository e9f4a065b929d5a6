"""CSV files: the tables that this program writes and reads back, and lists from spreadsheets.

Tables are written by RFC 4180. A spreadsheet takes a cell that begins with `=`, `+`, `-` or `@` for
a formula and runs it, and file names may begin like that. Such a text gets an apostrophe in front,
and so does one that begins with an apostrophe, a tab or a line break. Both readers drop the
apostrophe where such a text follows it, and only there. Numbers stay as they are.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from anomaly.errors import DataError

Rows = Iterator[tuple[int, dict[str, str]]]

_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
# Spreadsheets skip blanks before a formula; a tab or line break can lead into the next cell.
_GUARDED = re.compile(r"'|[\t\r\n]|\s*[=+\-@]")
# Beyond what RFC 4180 demands: whatever some reader takes for the end of a line.
_QUOTED = re.compile('[,";\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]|^\\s|\\s$')


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as lines of CSV: None is an empty cell, floats have all their digits."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows)


def csv_rows(text: str) -> list[list[str]]:
    """The cells of such lines.

    Raises:
        ValueError: these aren't lines of CSV.
    """
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [[_unguarded(cell) for cell in row] for row in rows]
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _cell(value: object) -> str:
    if not isinstance(value, str):
        return "" if value is None else repr(value)
    text = f"'{value}" if _GUARDED.match(value) else value
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _unguarded(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _GUARDED.match(cell, 1) else cell


def marked_encoding(data: bytes) -> tuple[str, bytes] | None:
    """The encoding of a byte order mark, and the bytes behind the mark; None without one."""
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
            UTF-8 with a mark may hold file names that are no text.
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
            yield reader.line_num + 1, {key: _unguarded(cell) for key, cell in row.items()}
    except csv.Error:
        raise DataError(
            f"{name} isn't a CSV file: a quote is never closed, or stands inside a cell"
        ) from None


def text_of(data: bytes, name: str) -> str:
    """A list's text, as `read_rows` takes it.

    Raises:
        DataError: it is no text in any of these encodings.
    """
    encoding, rest = marked_encoding(data) or ("", data)
    # What is marked as UTF-8 is no Windows-1252: other bytes are those of file names.
    names = "surrogateescape" if encoding == "utf-8" else "strict"
    for each in (encoding,) if encoding else ("utf-8", "cp1252"):
        try:
            text = rest.decode(each, names)
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return text
    before, null, _ = rest.decode(encoding or "latin-1", "replace").partition("\0")
    if null:
        name += f" line {before.count(chr(10)) + 1} holds a null character: it"
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


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of a table with columns of even width, flush right except those in `left`.

    Args:
        rows: the head first; columns that are empty below it are left out.
        left: columns that are flush left.
    """
    columns = [
        [f"{cell:<{width}}" if i in left else f"{cell:>{width}}" for cell in column]
        for i, column in enumerate(zip(*rows, strict=True))
        if any(column[1:]) and (width := max(map(len, column)))
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
