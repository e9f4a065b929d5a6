"""The notebooks run from top to bottom, and say and show what they did when they were recorded.

Record anew, where a change of outputs is meant:

    python tests/test_notebooks.py [name …]
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY
from PIL import Image

NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))
QUICK = ("feature_regularisation", "gradients")
WIDEST = 640  # of a recorded picture, in pixels
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, as the format of notebooks has them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_outputs("".join(cell["source"]), names, i + 1) for i, cell in enumerate(cells)]


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What one cell prints, and its last expression's value."""
    tree, said, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(said):
        exec(compile(tree, f"cell {count}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    found: list[dict[str, Any]] = []
    if text := said.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(True)})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
        found.append({**shown, "data": _shown(value)})
    return found


def _shown(value: Any) -> dict[str, Any]:
    png = value._repr_png_() if hasattr(value, "_repr_png_") else None
    if png is None:
        return {"text/plain": [repr(value)]}
    picture, jpeg = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    picture.thumbnail((WIDEST, WIDEST))
    picture.save(jpeg, "JPEG", quality=80)
    return {"image/jpeg": base64.b64encode(jpeg.getvalue()).decode(), "text/plain": ["a picture"]}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they all run: data that one has generated serve the others."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[] if file.stem in QUICK else pytest.mark.slow)
        for file in NOTEBOOKS
    ],
)
def test_a_notebook_says_and_shows_what_it_did(
    file: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    notebook = json.loads(file.read_text("utf-8"))
    recorded = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for before, now in zip(recorded, run(notebook), strict=True):
        assert [output["output_type"] for output in now] == [o["output_type"] for o in before]
        for one, other in zip(before, now, strict=True):
            _alike(one, other)


def _alike(before: dict[str, Any], now: dict[str, Any]) -> None:
    """The same words, about the same numbers, about the same picture."""
    texts = ["".join(o.get("text") or o["data"]["text/plain"]) for o in (before, now)]
    words = [NUMBER.sub("…", text).split() for text in texts]
    assert words[0] == words[1]
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in texts]
    assert numbers[1] == pytest.approx(numbers[0], rel=0.1, abs=1)
    if "image/jpeg" in before.get("data", {}):
        first, second = (_pixels(o["data"]["image/jpeg"]) for o in (before, now))
        assert first.shape == second.shape
        assert np.abs(first - second).mean() < 8


def _pixels(jpeg: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(jpeg))), np.float32)


def test_notebooks_are_committed_whole_small_and_without_traces() -> None:
    for file in NOTEBOOKS:
        text = file.read_text("utf-8")
        assert len(text) < 300_000, file
        assert not re.search(r"/tmp/|/home/|/root/|/work/|20\d\d-\d\d-\d\d", text), file
        assert any(cell.get("outputs") for cell in json.loads(text)["cells"]), file


def _record(names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        for file in NOTEBOOKS:
            if names and file.stem not in names:
                continue
            notebook = json.loads(file.read_text("utf-8"))
            cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
            for i, (cell, outputs) in enumerate(zip(cells, run(notebook), strict=True)):
                cell.update(outputs=outputs, execution_count=i + 1)
            file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
            print(file.name, f"{file.stat().st_size:,} bytes")


if __name__ == "__main__":
    _record(sys.argv[1:])
