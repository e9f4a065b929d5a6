"""Every message that the package raises is on the page of remedies, and none that it doesn't.

A message is told by its words; what varies is written `…`. What is missing or left over is printed
as it has to be added to docs/troubleshooting.md or removed there.

    python tests/test_troubleshooting.py    # prints all messages with their modules
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "troubleshooting.md"
LISTED = re.compile(r"^- `` (.*) ``$", re.MULTILINE)
# Errors of Python that people see, too; the second argument is pydantic's message.
ALSO = {"ValueError": 0, "TypeError": 0, "MemoryError": 0, "PydanticCustomError": 1}


def messages(package: Path) -> dict[str, set[str]]:
    """The modules that raise each message, by its words."""
    trees = {file: ast.parse(file.read_text("utf-8")) for file in sorted(package.rglob("*.py"))}
    makers = dict.fromkeys(_errors(trees.values()), 0) | ALSO
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for text in _raised(tree, makers):
            if len(re.findall(r"[^\W\d_]{2,}", text)) > 1:
                found.setdefault(text, set()).add(file.relative_to(package).as_posix())
    return found


def _errors(trees: Iterator[ast.Module] | object) -> set[str]:
    """Names of the error classes, and of the functions that make one from a message."""
    nodes = [node for tree in trees for node in ast.walk(tree)]  # type: ignore[attr-defined]
    names = {"Exception", "BaseException"}
    size = 0
    while size != len(names):  # a class may stand before its base
        size = len(names)
        for node in nodes:
            match node:
                case ast.ClassDef(bases=[*bases]) if names & {_name(base) for base in bases}:
                    names.add(node.name)
    made = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.returns and _name(node.returns) in names
    }
    return (names | made) - {"Exception", "BaseException"}


def _raised(tree: ast.Module, makers: dict[str, int]) -> Iterator[str]:
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.Lambda | ast.Module):
            continue
        inside = list(_own(scope))
        values = {
            node.targets[0].id: node.value
            for node in inside
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in inside:
            match node:
                case ast.Call(func=func, args=[_, *_]) if _name(func) in makers:
                    place = makers[_name(func)]
                    if place < len(node.args):
                        yield from _texts(node.args[place], values)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield from _own(node)


def _texts(node: ast.expr, values: dict[str, ast.expr]) -> list[str]:
    """The words of a message; of either branch where there are two."""
    match node:
        case ast.IfExp(body=one, orelse=other):
            return [*_texts(one, values), *_texts(other, values)]
        case ast.Name(id=name) if name in values:
            return _texts(values[name], {k: v for k, v in values.items() if k != name})
    return [re.sub(r"(… ?)+…|…+", "…", " ".join(_words(node).split()))]


def _words(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_words, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _words(left) + _words(right)
    return "…"


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
    return ""


def test_every_message_is_on_the_page_once_and_none_is_left_over() -> None:
    raised, listed = messages(REPOSITORY / "anomaly"), LISTED.findall(PAGE.read_text("utf-8"))
    missing = [f"- `` {text} ``   ({', '.join(sorted(raised[text]))})" for text in raised
               if text not in listed]  # fmt: skip
    assert not missing, "add to docs/troubleshooting.md:\n" + "\n".join(missing)
    stale = [f"- `` {text} ``" for text in listed if text not in raised]
    assert not stale, "nothing raises this any more; remove:\n" + "\n".join(stale)
    assert len(listed) == len(set(listed))


def test_every_section_says_what_to_do() -> None:
    sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert len(sections) > 20
    for section in sections:
        title, _, text = section.partition("\n")
        remedy = text.split("\n- `` ")[0]
        assert len(remedy.split()) > 8, title


def test_messages_are_found_however_they_are_raised(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text("class Base(Exception): ...\nclass Wrong(Base): ...\n")
    (tmp_path / "code.py").write_text(
        "def broken(what) -> Wrong:\n    return Wrong(f'{file}: {what}')\n"
        "def a(x):\n"
        "    raise Wrong(f'{x} is wrong; ' 'mend it')\n"
        "def b(x):\n"
        "    text = f'{x} is odd' if x else 'there is nothing'\n"
        "    raise errors.Wrong(text) from None\n"
        "def c(x):\n    raise broken('it is cut ' + 'short')\n"
        "def d(x):\n    raise ValueError(str(x))\n"
    )
    assert messages(tmp_path) == {
        text: {"code.py"}
        for text in ("… is wrong; mend it", "… is odd", "there is nothing", "it is cut short")
    }


if __name__ == "__main__":
    for text, modules in messages(REPOSITORY / "anomaly").items():
        print(*sorted(modules), text, sep="\t")
