"""Views of one part make one verdict."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Command, write_part

from anomaly.inference.rows import Row, judge_parts


def _row(path: str, verdict: str, score: float | None = 1.0) -> Row:
    status = "ok" if score is not None else "unreadable"
    reason = "odd" if verdict == "review" else "" if score is not None else "broken"
    return Row(path, "", status, score, None, 1.5, 2.0, verdict, "", "m", "1", "", reason)


@pytest.mark.parametrize(
    ("views", "verdict", "decides"),
    [
        ([("good", 1.0), ("good", 1.5)], "good", 1),
        ([("good", 1.0), ("reject", 3.0), ("reject", 4.0)], "reject", 2),
        ([("review", 9.0), ("reject", 3.0)], "reject", 1),
        ([("good", 1.0), ("review", 0.5), ("good", 1.5)], "review", 1),
        ([("good", 1.0), ("", None)], "review", 1),
        ([("", None), ("reject", 3.0)], "reject", 1),
        ([("", 1.0), ("", 2.0)], "", 1),
    ],
)
def test_verdicts(views: Sequence[tuple[str, float | None]], verdict: str, decides: int) -> None:
    rows = [_row(str(i), *view) for i, view in enumerate(views)]
    (part,) = judge_parts(rows, {str(i): "a" for i in range(len(views))})
    assert part.verdict == verdict
    assert part.path == str(decides)
    assert part.views == len(views)
    scores = [score for _, score in views if score is not None]
    assert (part.scored, part.image_score) == (len(scores), max(scores))
    assert bool(part.reason) == (verdict == "review")


def test_a_part_is_judged_when_all_its_views_are_there() -> None:
    rows = [_row("1", "good"), _row("2", "good"), _row("x", "reject")]
    parts = judge_parts(rows, {"1": "b", "2": "a", "3": "b"})
    assert [part.group for part in parts] == ["a"]


def test_a_list_with_groups(run_folder: Path, tmp_path: Path, command: Command) -> None:
    for name, mark in (("a1", None), ("a2", (30, 50)), ("b1", None), ("c1", None)):
        write_part(tmp_path / f"{name}.png", seed=len(name), mark=mark)
    listed = "".join(f'"{tmp_path / n}.png",{n[0]}\r\n' for n in ("a1", "a2", "b1", "c1", "c2"))
    (tmp_path / "list.csv").write_text("\ufeffpath,group\r\n" + listed, encoding="utf-8")
    base = ["--model", run_folder, "--list", tmp_path / "list.csv", "--output"]
    assert command("infer", [*base, tmp_path / "out"])[0] == 3
    with (tmp_path / "out" / "parts.csv").open(newline="") as stream:
        parts = {part["group"]: part for part in csv.DictReader(stream)}
    assert {g: p["verdict"] for g, p in parts.items()} == {
        "a": "reject",
        "b": "good",
        "c": "review",
    }
    assert Path(parts["a"]["path"]).name == "a2.png"
    assert "c2.png" in parts["c"]["reason"]
    assert (parts["c"]["views"], parts["c"]["scored"]) == ("2", "1")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("a.png,1\na.png,2\n", "line 3: a.png is in group '2' here and in '1'"),
        ("a.png,\n", "line 2: path and group mustn't be empty"),
        ("", "names no image"),
    ],
)
def test_lists_that_cant_be_used(
    lines: str, says: str, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "list.csv").write_text("path,group\n" + lines)
    base = ["--model", run_folder, "--list", tmp_path / "list.csv", "--output", tmp_path / "out"]
    code, _, err = command("infer", base)
    assert (code, says in err) == (2, True)
