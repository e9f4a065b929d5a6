"""Tables that every reader takes apart alike, and that no spreadsheet runs."""

import csv
import io
import json
from pathlib import Path

import pytest
from conftest import Command, write_part
from hypothesis import given
from hypothesis import strategies as st

from anomaly.datasets.inputs import find_inputs
from anomaly.files.tables import csv_rows, csv_text, read_rows

_NASTY = st.text(st.sampled_from("=+-@'\t\r\n\",; ab1\u2028\x85\udc80é"), max_size=8)


@given(st.lists(st.lists(_NASTY, min_size=2, max_size=4), min_size=1))
def test_round_trip(rows: list[list[str]]) -> None:
    text = csv_text(rows)
    assert csv_rows(text) == rows
    # Python's own reader has the same cells, one apostrophe aside.
    plain = list(csv.reader(io.StringIO(text, newline="")))
    assert [[cell.removeprefix("'") for cell in row] for row in plain] == rows
    for cell in (cell for row in plain for cell in row):
        assert not cell.lstrip().startswith(("=", "+", "-", "@")), cell
        assert not cell.startswith(("\t", "\r", "\n"))


def test_numbers_are_left_alone() -> None:
    assert csv_text([(-0.5, None, 3, "-0.5", "a b")]) == "-0.5,,3,'-0.5,a b\n"
    with pytest.raises(ValueError, match="end of data"):
        csv_rows('a,"b')


def test_an_apostrophe_of_a_lists_own_stays() -> None:
    data = b"path\n'90s.png\n'=1.png\n''a.png\n"
    rows = read_rows(data, "list", ("path",), ("path",))
    assert [row["path"] for _, row in rows] == ["'90s.png", "=1.png", "'a.png"]


_NAMES = [*("=1+1.png", "+a.png", "-b.png", "@c.png"), "two\rlines.png", "a\tb.png", "'q.png"]
_NAMES += ["n\n.png"]


def test_names_of_files(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(_NAMES):
        write_part(Path(name), seed=i, mark=(30, 50) if i % 2 else None)
    listed = ["path,group", *(f'"{name}","={name}"' for name in _NAMES)]
    Path("list.csv").write_text("\n".join(listed), newline="")
    arguments = ["--model", run_folder, "--input", "list.csv", "--output", "out"]
    assert command("infer", [*arguments, "--write", "regions"])[0] == 0
    for table in ("results.csv", "regions.csv", "parts.csv"):
        text = Path("out", table).read_bytes().decode()
        header, *rows = csv_rows(text)
        found = {row[header.index("path")] for row in rows}
        assert found == set(_NAMES) if table != "regions.csv" else found < set(_NAMES)
        plain = list(csv.DictReader(io.StringIO(text, newline="")))
        assert len(plain) == len(rows)
        assert not any(row["path"].startswith(("=", "+", "-", "@")) for row in plain)
    assert {str(path) for path in find_inputs([Path("out/results.csv")]).paths} == set(_NAMES)
    lines = Path("out", "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["path"] for line in lines} == set(_NAMES)
