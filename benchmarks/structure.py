"""How large the package is, and how much of it hangs on what: a table to read before a clean-up.

    python -m benchmarks.structure [--names] [--path]

The annexes are what the core doesn't import: `line`, `cluster`, `export`, `sample_data`. An
importer is a module with an import statement, wherever in it that stands and whatever it is for
(types, too); circles are those of imports that can run, also inside functions. A name that a
package's `__init__` passes on counts for the module that defines it; passing it on doesn't count as
importing it, but in `anomaly/__init__.py`, whose names are the API.
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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
ANNEXES = ("line", "cluster", "export", "sample_data")
_SHORT = 130  # code lines below which a module with one importer had better be part of it
# A bank of 4,096 vectors, which is searched as banks of a usual size are.
_FAST = ("backbone.name=resnet18", "backbone.weights=random", "model.coreset_size=4096")
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
        """Groups of modules that import one another, at the top or inside functions."""
        imports: dict[str, set[str]] = defaultdict(set)
        for module in self.trees:
            types = self._for_types(module)
            for node in self._statements(module):
                if node not in types and isinstance(node, ast.ImportFrom) and node.module:
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

    def _for_types(self, module: str) -> set[ast.AST]:
        return {
            node
            for block in ast.walk(self.trees[module])
            if isinstance(block, ast.If)
            and isinstance(block.test, ast.Name)
            and block.test.id == "TYPE_CHECKING"
            for node in ast.walk(block)
        }


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
    import anomaly.inference.run as run
    from anomaly.imaging import decoder_worker
    from anomaly.imaging.decoder_pool import _DecoderProcess

    workers: dict[int, Any] = {}

    def exchange(
        process: object, request: object, task: Any, name: str, arguments: tuple[Any, ...]
    ) -> tuple[bool, Any]:
        worker = workers.setdefault(id(task), decoder_worker.Worker(task))
        return True, getattr(worker, name)(*arguments)

    def infer(*arguments: Any, **options: Any) -> Any:
        path.recording = True
        sys.setprofile(path)
        try:
            return scored(*arguments, **options)
        finally:
            sys.setprofile(None)
            path.recording = False

    usual, scored = _DecoderProcess._exchange, run.infer
    _DecoderProcess._exchange, run.infer = exchange, infer  # type: ignore[method-assign]
    try:
        yield
    finally:
        _DecoderProcess._exchange, run.infer = usual, scored  # type: ignore[method-assign]


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


def _code(package: Path, lines: dict[str, int], module: str) -> int:
    place = Path(*module.split(".")[1:])
    return lines.get(f"{place}.py", lines.get(f"{place}/__init__.py", 0))


def _must(main: Callable[[list[str]], int], *arguments: object) -> None:
    if code := main([str(one) for one in arguments]):
        raise SystemExit(f"{arguments[0]} ended with {code}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list what has one importer")
    parser.add_argument("--path", action="store_true", help="list the modules of an image's path")
    options = parser.parse_args()
    package = ROOT / "anomaly"
    imports = Imports(package)
    sources = {file: file.read_text("utf-8") for file in package.rglob("*.py")}
    lengths = [n for tree in imports.trees.values() for n in function_lengths(tree)]
    single = sorted((m, *who) for m, who in imports.edges.items() if len(who) == 1)
    serving = sorted((*name, *who) for name, who in imports.names.items() if len(who) == 1)
    lines = {
        file.relative_to(package).as_posix(): code_lines(text, ast.parse(text))
        for file, text in sources.items()
    }
    core = {file: count for file, count in lines.items() if not file.startswith(ANNEXES)}
    short = [(module, *rest) for module, *rest in single if _code(package, lines, module) < _SHORT]
    path = trace()
    rows = {
        "entries of anomaly/": sum(not p.name.startswith("__pyc") for p in package.iterdir()),
        "files": len(lines),
        "files of the core": len(core),
        "modules with one importer": len(single),
        f"of them under {_SHORT} lines": len(short),
        "names imported across modules": len(imports.names),
        "of them by one importer": len(serving),
        "import circles": len(imports.cycles()),
        "imports inside functions": len(imports.inside_functions()),
        "modules on an image's path": len(path.modules),
        "calls between them on it": len(path.calls),
        "lines": sum(len(text.splitlines()) for text in sources.values()),
        "lines of code": sum(lines.values()),
        "lines of code of the core": sum(core.values()),
        "functions": len(lengths),
        "function lines, median": median(lengths),
        "function lines, most": max(lengths),
    }
    for what, count in rows.items():
        print(f"{what:<32}{count:>8g}")
    if options.names:
        print(f"\none importer, under {_SHORT} lines:")
        print("\n".join(f"  {module} <- {who}" for module, who in short))
        print("\nnames for one importer:")
        print("\n".join(f"  {module}.{name} <- {who}" for module, name, who in serving))
    if options.path:
        print("\npath:", *sorted(path.modules), sep="\n  ")


if __name__ == "__main__":
    main()
