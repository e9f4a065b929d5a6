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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from anomaly.errors import DataError

Rows = Iterator[tuple[int, dict[str, str]]]

_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# As spreadsheets save a list in Western Europe, China, Japan, Taiwan, Korea, Poland and Russia.
CODE_PAGES = ("cp1252", "gb18030", "cp932", "big5", "cp949", "cp1250", "cp1251")
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
# The first line of a list may name its delimiter, for Excel: `sep=;`.
SEPARATOR = re.compile('"?sep=', re.IGNORECASE)
# Spreadsheets skip blanks before a formula; a tab or line break can lead into the next cell.
_GUARDED = re.compile(r"'|[\t\r\n]|\s*[=+\-@]")
# Beyond what RFC 4180 demands: whatever some reader takes for the end of a line.
_QUOTED = re.compile('[,";\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]|^\\s|\\s$')


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as lines of CSV: None is an empty cell, floats have all their digits."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows)


def csv_rows(text: str) -> list[list[str]]:
    """Cells of a text that `csv_text` has written, row by row.

    Raises:
        ValueError: the text isn't CSV.
    """
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [[_unguarded(cell) for cell in row] for row in rows]
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _cell(value: object) -> str:
    """A value as a cell of CSV; text that a spreadsheet would run gets an apostrophe in front."""
    if not isinstance(value, str):
        return "" if value is None else repr(value)
    text = f"'{value}" if _GUARDED.match(value) else value
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _unguarded(cell: str) -> str:
    """A cell's text without the apostrophe that `_cell` puts in front."""
    return cell[1:] if cell.startswith("'") and _GUARDED.match(cell, 1) else cell


def header_of(first_line: str, columns: Sequence[str]) -> tuple[list[str], str]:
    """The cells of a list's first line, and its delimiter: it yields most known columns.

    Of several such delimiters the one with most cells is taken.
    """

    def split(delimiter: str) -> list[str]:
        cells = next(csv.reader([first_line], delimiter=delimiter), [])
        return [cell.strip() for cell in cells]

    best = max(_DELIMITERS, key=lambda d: (len(set(split(d)) & set(columns)), len(split(d))))
    return split(best), best


def read_rows(
    data: bytes,
    name: str,
    columns: Sequence[str],
    needed: Sequence[str],
    worth: Callable[[Mapping[str, str]], int] = lambda row: 0,
) -> Rows:
    """(line number, cells by column) for each row of a CSV list that isn't blank.

    Args:
        data: the file's bytes: UTF-8, UTF-16 with a mark, or a code page of a spreadsheet's
            country. UTF-8 with a mark may hold file names that are no text.
        name: the list's name, for messages.
        columns: known columns. Others are left alone, misspelt ones refused.
        needed: known columns that have to be there.
        worth: rates a row by how well it fits the files on disk, higher is better. Of several
            code pages, the one with the highest sum over all rows is taken.

    Raises:
        DataError: (perhaps only while rows are read) no text, no CSV, a column that is missing or
            misspelt, a row of too many cells; or several code pages fit equally and differ in
            known columns.
    """
    readings = [_rows_of(text, name, columns, needed) for text in texts_of(data)]
    if len(readings) == 1:
        return readings[0]
    by_worth: dict[int, list[list[tuple[int, dict[str, str]]]]] = {}
    for rows in map(list, readings):
        by_worth.setdefault(sum(worth(row) for _, row in rows), []).append(rows)
    best = by_worth[max(by_worth)]
    known = [[[row.get(c) for c in columns] for _, row in rows] for rows in best]
    if any(rows != known[0] for rows in known):
        raise DataError(
            f"{name} isn't UTF-8, and the files that it names don't tell its encoding; see that "
            "they exist, and save it as CSV UTF-8"
        )
    return iter(best[0])


def _rows_of(text: str, name: str, columns: Sequence[str], needed: Sequence[str]) -> Rows:
    """The rows of a decoded list; arguments and errors as in `read_rows`."""
    before, null, _ = text.partition("\0")
    if null:
        line = before.count("\n") + 1
        raise DataError(
            f"{name} line {line} holds a null character: it isn't text in UTF-8, UTF-16 or a code "
            "page; save it as CSV UTF-8"
        )
    lines = io.StringIO(text, newline="")
    try:
        first, skipped = lines.readline(), 1
        if SEPARATOR.match(first):
            first, skipped = lines.readline(), 2
        header, delimiter = header_of(first, columns)
        _check_columns(name, header, columns, needed)
        reader = csv.DictReader(lines, header, restval="", strict=True, delimiter=delimiter)
        for row in reader:
            if not any("".join(cell).strip() for cell in row.values()):
                continue
            if None in row:
                raise DataError(
                    f"{name} line {reader.line_num + skipped} has more cells than the header; put "
                    f"paths that hold {_DELIMITERS[delimiter]} in quotes"
                )
            yield reader.line_num + skipped, {key: _unguarded(cell) for key, cell in row.items()}
    except csv.Error:
        raise DataError(
            f"{name} isn't a CSV file: a quote is never closed, or stands inside a cell"
        ) from None


def texts_of(data: bytes) -> list[str]:
    """The text of a list's bytes; if they aren't Unicode, one text for each code page that fits."""
    mark = next(filter(data.startswith, _MARKS), b"")
    encoding, rest = _MARKS.get(mark, "utf-8"), data.removeprefix(mark)
    # What is marked as UTF-8 is in no code page: other bytes are those of file names.
    names = "surrogateescape" if mark == codecs.BOM_UTF8 else "strict"
    try:
        texts = [rest.decode(encoding, names)]
    except UnicodeDecodeError:
        texts = [rest.decode(page, "replace") for page in CODE_PAGES]
        texts = [text for text in texts if "\ufffd" not in text]
        texts.append(rest.decode("ascii", "replace"))  # fits no worse where nothing tells
    return texts


def _check_columns(
    name: str, present: Sequence[str], columns: Sequence[str], needed: Sequence[str]
) -> None:
    """Refuse a header that misspells a known column or lacks a needed one."""
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
    """Lines of a table for a terminal; all cells of a column are padded to one width.

    Args:
        rows: the header, then the rows; a column that is empty below its header is left out.
        left: indices of columns that are flush left; the others are flush right.
    """
    columns = [
        [f"{cell:<{width}}" if i in left else f"{cell:>{width}}" for cell in column]
        for i, column in enumerate(zip(*rows, strict=True))
        if any(column[1:]) and (width := max(map(len, column)))
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
