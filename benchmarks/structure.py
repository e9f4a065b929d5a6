"""How large the package is, and how much of it hangs on what; `make check` runs it.

    python -m benchmarks.structure [--names] [--path]

No count may be above its limit in `[tool.structure]` of pyproject.toml. Lines of code are without
docstrings, comments and blank lines. The core is all but what helps before and after a model
(`_DESK`), the line and the cluster. An option counts once for each command that has it, without
those that all commands have. An importer is a module with an import statement, wherever in it that
stands and whatever it is for (types, too), and so are circles. A name that a package's `__init__`
passes on counts for the module that defines it; passing it on doesn't count as importing it, but
in `anomaly/__init__.py`, whose names are the API.
The path of one image is what `infer` runs from the file to the row of a PNG, decoding and drawing
included, which are made to run in this process for it; loading the model and what a command prints
aren't part of it.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from anomaly.cli import options_of
from anomaly.cli.commands import COMMANDS
from anomaly.config.schema import Config

ROOT = Path(__file__).parents[1]
# What helps a person before and after the model, by the beginnings of its files' names.
_DESK = ("desk", "cli/start", "cli/change")
_NOT_CORE = ("line", "cluster", *_DESK)
# A bank of all patches, which is searched as banks of a usual size are.
_FAST = ("backbone.name=resnet18", "backbone.weights=random", "model.coreset_ratio=1")
_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Imports:
    """Who imports what in a package."""

    def __init__(self, package: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        self._passing: set[str] = set()
        for file in sorted(package.rglob("*.py")):
            parts = file.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.trees[name] = ast.parse(file.read_text("utf-8"))
            if parts[-1] == "__init__":
                self._passing.add(name)
        self._passing -= {package.name}
        self._aliases = {
            (module, alias.asname or alias.name): (node.module, alias.name)
            for module in self._passing
            for node in self._statements(module)
            if isinstance(node, ast.ImportFrom) and node.module and node.module != module
            for alias in node.names
        }
        self.edges: dict[str, set[str]] = defaultdict(set)  # imported module: its importers
        self.names: dict[tuple[str, str], set[str]] = defaultdict(set)  # (module, name): importers
        for module in self.trees:
            for node in self._statements(module):
                self._add(module, node)

    def _statements(self, module: str) -> Iterator[ast.Import | ast.ImportFrom]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node

    def _add(self, importer: str, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in self.trees:
                    self.edges[alias.name].add(importer)
            return
        for alias in node.names:
            passed_on = (importer, alias.asname or alias.name) in self._aliases
            target = node.module or "", alias.name
            while target in self._aliases:
                target = self._aliases[target]
            module, name = target
            if f"{module}.{name}" in self.trees:
                self.edges[f"{module}.{name}"].add(importer)
            elif module in self.trees and not (passed_on and self._exported(importer, alias)):
                self.edges[module].add(importer)
                self.names[target].add(importer)

    def _exported(self, module: str, alias: ast.alias) -> bool:
        used = {n.id for n in ast.walk(self.trees[module]) if isinstance(n, ast.Name)}
        return (alias.asname or alias.name) not in used

    def cycles(self) -> list[set[str]]:
        """Groups of modules that import one another, wherever and whatever for."""
        imports: dict[str, set[str]] = defaultdict(set)
        for module in self.trees:
            for node in self._statements(module):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        name = f"{node.module}.{alias.name}"
                        imports[module].add(name if name in self.trees else node.module)
            imports[module] &= self.trees.keys() - {module}
        reached = {module: _reached(module, imports) for module in self.trees}
        groups = {
            frozenset(m for m in reached[module] if module in reached[m])
            for module in self.trees
            if module in reached[module]
        }
        return [set(group) for group in groups]

    def inside_functions(self) -> list[tuple[str, int]]:
        """Where the package is imported inside functions: module and line."""
        return sorted(
            {
                (module, node.lineno)
                for module, tree in self.trees.items()
                for function in ast.walk(tree)
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                for node in ast.walk(function)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anomaly")
            }
        )


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += imports[module]
    return found


def code_lines(source: str, tree: ast.Module) -> int:
    """Lines with code: neither blank, nor comments, nor docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def function_lengths(tree: ast.Module) -> list[int]:
    """Lines of each function, from `def` to its end, without its docstring."""
    lengths = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                said = node.body[0]
                length -= (said.end_lineno or 0) - said.lineno + 1
            lengths.append(length)
    return lengths


class Route:
    """What is called on the way of an image, on any thread, while it records."""

    def __init__(self) -> None:
        self.recording = False
        self.modules: set[str] = set()
        self.calls: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.recording or event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if not _ours(frame):
            return
        self.modules.add(module)
        caller = frame.f_back
        while caller is not None and not _ours(caller):
            caller = caller.f_back
        if caller is not None and caller.f_globals["__name__"] != module:
            self.calls.add((_name(caller), _name(frame)))


def _ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith("anomaly.") and not module.startswith("anomaly.cli.")


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"


@contextmanager
def _decoding_here(path: Route) -> Iterator[None]:
    """Let the decoding processes' work be done here, and record while a run scores."""
    from anomaly.imaging.pool import Worker, _DecoderProcess, close
    from anomaly.inference.pipeline import Run

    worker = Worker()
    close()  # threads of the pool that run already wouldn't be followed

    def exchange(
        process: object, request: object, task: Any, name: str, arguments: tuple[Any, ...]
    ) -> tuple[bool, Any]:
        return worker.answer(task, name, arguments)

    def score(*arguments: Any, **options: Any) -> Any:
        path.recording = True
        sys.setprofile(path)
        try:
            return scored(*arguments, **options)
        finally:
            sys.setprofile(None)
            path.recording = False

    usual, scored = _DecoderProcess._exchange, Run.score
    _DecoderProcess._exchange, Run.score = exchange, score  # type: ignore[method-assign]
    try:
        yield
    finally:
        _DecoderProcess._exchange, Run.score = usual, scored  # type: ignore[method-assign]


def trace() -> Route:
    """Train on a few images of noise, and follow one of them through `infer`."""
    import cv2

    from anomaly.cli import main

    path = Route()
    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()):
        good = Path(name) / "data" / "good"
        good.mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng(i).integers(90, 160, (96, 120, 3), np.uint8)
            cv2.imwrite(str(good / f"{i}.png"), pixels)
        sets = [*_FAST, f"data.root={name}", "data.category=data", "data.format=mvtec"]
        (good.parent / "train").mkdir()
        good.rename(good.parent / "train" / "good")
        flags = [part for one in sets for part in ("--set", one)]
        run, result = Path(name) / "run", Path(name) / "results"
        config = ROOT / "configs" / "folder.yaml"
        _must(main, "train", "--config", config, *flags, "--output", run)
        image = good.parent / "train" / "good" / "0.png"
        with _decoding_here(path):
            threading.setprofile(path)
            try:
                _must(main, "infer", "--model", run, "--input", image, "--output", result)
            finally:
                threading.setprofile(None)
    return path


def _must(main: Callable[[list[str]], int], *arguments: object) -> None:
    if code := main([str(one) for one in arguments]):
        raise SystemExit(f"{arguments[0]} ended with {code}")


def options() -> list[tuple[str, str]]:
    """(command, option) of each option that not every command has."""
    every = {command: set(options_of(command)) for command in COMMANDS}
    common = set.intersection(*every.values())
    return [(command, name) for command, names in every.items() for name in names - common]


def settings(section: type[BaseModel] = Config) -> list[str]:
    """The settings of the config, dotted."""
    names = []
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        names += [name] if inner is None else [f"{name}.{one}" for one in settings(inner)]
    return names


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)


def _code_lines(folder: Path) -> dict[str, int]:
    """Lines of code by file, relative to the folder."""
    return {
        file.relative_to(folder).as_posix(): code_lines(text, ast.parse(text))
        for file in sorted(folder.rglob("*.py"))
        for text in [file.read_text("utf-8")]
    }


def counts(imports: Imports, path: Route) -> dict[str, float]:
    """All counts by name."""
    lines = _code_lines(ROOT / "anomaly")
    texts = [file.read_text("utf-8") for file in (ROOT / "anomaly").rglob("*.py")]
    lengths = [n for tree in imports.trees.values() for n in function_lengths(tree)]
    pairs = {(who, what) for what, who_all in imports.edges.items() for who in who_all}
    single = [what for what, who in imports.edges.items() if len(who) == 1]
    pages = [file.read_text("utf-8") for file in (ROOT / "docs").rglob("*.md")]
    return {
        "code lines": sum(lines.values()),
        "core code lines": sum(n for file, n in lines.items() if not file.startswith(_NOT_CORE)),
        "characters of source": sum(map(len, texts)),
        "test code lines": sum(_code_lines(ROOT / "tests").values()),
        "files": len(lines),
        "modules with one importer": len(single),
        "imports a module": round(len(pairs) / len(lines), 2),
        "names imported by one module": sum(len(who) == 1 for who in imports.names.values()),
        "import circles": len(imports.cycles()),
        "imports inside functions": len(imports.inside_functions()),
        "modules on an image's path": len(path.modules),
        "calls between them": len(path.calls),
        "commands": len(COMMANDS),
        "options": len(options()),
        "settings": len(settings()),
        "words of docs": sum(len(text.split()) for text in pages),
        "benchmark files": len(list((ROOT / "benchmarks").glob("*.py"))),
        "scripts": len(list((ROOT / "scripts").glob("*.py"))),
        "functions": len(lengths),
        "function lines, median": median(lengths),
        "function lines, most": max(lengths),
    }


def limits() -> dict[str, float]:
    """The highest counts allowed, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return dict(tomllib.loads(text)["tool"]["structure"])


def main() -> None:
    """Print the table; exit with 1 where a count is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list what has one importer")
    parser.add_argument("--path", action="store_true", help="list the modules of an image's path")
    given = parser.parse_args()
    imports, path, most = Imports(ROOT / "anomaly"), trace(), limits()
    found = counts(imports, path)
    for what, count in found.items():
        limit = f"at most {most[what]:g}" if what in most else ""
        print(f"{what:<32}{count:>10g}   {limit}".rstrip())
    if given.names:
        print("\none importer:")
        print(*sorted((m, *who) for m, who in imports.edges.items() if len(who) == 1), sep="\n")
        print("\nnames for one importer:")
        print(*sorted((*n, *w) for n, w in imports.names.items() if len(w) == 1), sep="\n")
    if given.path:
        print("\npath:", *sorted(path.modules), sep="\n  ")
    if unknown := most.keys() - found.keys():
        raise SystemExit(f"[tool.structure] limits what isn't counted: {', '.join(unknown)}")
    above = [what for what, limit in most.items() if found[what] > limit]
    if above:
        raise SystemExit(f"above the limits of [tool.structure]: {', '.join(above)}")


if __name__ == "__main__":
    main()
