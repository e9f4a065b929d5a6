"""The messages of the errors that the package raises, as its source has them.

What varies in a message is written `…`. Its heading is the docstring of the class in
`anomaly/errors.py` that the error is of; Python's own errors have one together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# Errors of Python that users see, too: which argument is the message.
_OF_PYTHON = {"ValueError": 0, "TypeError": 0, "MemoryError": 0, "PydanticCustomError": 1}
_CONTRADICTION = "A call from Python contradicts itself, or a setting has a value that can't be."
_ANY = "Anything else that input, files or the machine can cause."
_MARK = "<!-- Below: written by `python docs/generate.py` from the messages in the code. -->"


def with_messages(page: str, package: Path) -> str:
    """A page whose end, below its mark, is a table of all messages for each kind of error."""
    parts = [page.partition(_MARK)[0] + _MARK]
    for heading, texts in sorted(messages(package).items()):
        head = f"\n### {heading.rstrip('.')}\n\n| message | what to do |\n|---|---|"
        parts += [head, *sorted(map(_row, texts))]
    return "\n".join(parts) + "\n"


def messages(package: Path) -> dict[str, set[str]]:
    """The messages under each heading."""
    files = sorted(package.rglob("*.py"))
    trees = {file: ast.parse(file.read_text("utf-8")) for file in files}
    headings = _headings(trees)
    found: dict[str, set[str]] = {}
    for tree in trees.values():
        for maker, text in _raised(tree, headings):
            if len(re.findall(r"[^\W\d_]{2,}", text)) > 1:
                found.setdefault(headings[maker], set()).add(text)
    return found


def _row(text: str) -> str:
    """A message's line; what stands behind its first semicolon is what to do."""
    problem, _, remedy = text.partition("; ")
    if len(problem) < 3:
        problem, remedy = text, ""
    return f"| {_code(problem)} | {_code(remedy)} |"


def _code(text: str) -> str:
    if not text:
        return ""
    return f"`` {text} ``".replace("|", r"\|") if "`" in text else f"`{text}`".replace("|", r"\|")


def _headings(trees: Mapping[Path, ast.Module]) -> dict[str, str]:
    """The heading of each error class, and of each function that makes an error."""
    headings = dict.fromkeys(_OF_PYTHON, _CONTRADICTION)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for file, tree in trees.items():
        if file.name == "errors.py":
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    headings[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]
                    if headings[node.name].startswith("Base of"):
                        headings[node.name] = _ANY
    size = 0
    while size != len(headings):  # a class may stand before its base
        size = len(headings)
        for node in classes:
            bases = [headings[name] for name in map(_name, node.bases) if name in headings]
            if bases:
                headings.setdefault(node.name, bases[0])
    makers = {
        node.name: headings[_name(node.returns)]
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.returns and _name(node.returns) in headings
    }
    return makers | headings


def _raised(tree: ast.Module, makers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What makes each error, and its message."""
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
                case ast.Call(func=func, args=[_, *_]) if (maker := _name(func)) in makers:
                    place = _OF_PYTHON.get(maker, 0)
                    if place < len(node.args):
                        yield from ((maker, text) for text in _texts(node.args[place], values))


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield from _own(node)


def _texts(node: ast.expr, values: Mapping[str, ast.expr]) -> list[str]:
    """The words of a message; of either branch where there are two."""
    match node:
        case ast.IfExp(body=first, orelse=second):
            return [*_texts(first, values), *_texts(second, values)]
        case ast.Name(id=name) if name in values:
            return _texts(values[name], {k: v for k, v in values.items() if k != name})
    return [re.sub(r"(… ?)+…|…+", "…", " ".join(words(node).split()))]


def words(node: ast.expr) -> str:
    """The text of a string in the source, `…` for what varies."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(words, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return words(left) + words(right)
    return "…"


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
    return ""
