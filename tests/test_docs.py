"""The documentation runs, and shows nothing that doesn't."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest
import torch

from anomaly.config.schema import Config

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("*/*.py"))
QUICK = ("hooks/capturing.py", "hooks/pre.py", "hooks/tensors.py")
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([\w/]+\.py)\)")


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.slow) for s in SCRIPTS]
)
def test_every_script_runs(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(2)  # as many as before afterwards, see tests/conftest.py
    with torch.random.fork_rng():
        runpy.run_path(str(DOCS / script), run_name="__main__")


def sections(page: Path) -> list[tuple[str, list[str], list[str]]]:
    """(title, scripts linked, snippets shown) of each section."""
    texts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
    return [(t.splitlines()[0], LINK.findall(t), SNIPPET.findall(t)) for t in texts]


def test_the_hooks_page_links_every_script_and_shows_only_what_runs() -> None:
    page = DOCS / "hooks.md"
    (imports,) = SNIPPET.findall(page.read_text("utf-8").split("\n## ")[0])
    exec(imports, {})
    found = sections(page)
    linked = [script for _, scripts, _ in found for script in scripts]
    assert sorted(linked) == [script for script in SCRIPTS if script.startswith("hooks/")]
    for title, scripts, snippets in found:
        code = "".join((DOCS / script).read_text() for script in scripts)
        for snippet in snippets:
            assert snippet in code, f"section {title!r} shows code that its script doesn't have"


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("generate")


def test_the_page_of_settings_is_that_of_the_schema(generate: ModuleType) -> None:
    page = (DOCS / "settings.md").read_text("utf-8")
    assert page == generate.settings_page(), "run `python docs/generate.py`"
    keys = [f"{section}.{key}" for section, field in Config.model_fields.items()
            for key in getattr(field.annotation, "model_fields", {})]  # fmt: skip
    for key in [*keys, "precision", "seed"]:
        (row,) = re.findall(rf"^\| `{re.escape(key)}` \|.*\| (.+) \|$", page, re.MULTILINE)
        assert row.endswith("."), key


def test_the_drawing_shows_every_room(generate: ModuleType) -> None:
    drawing = generate.rooms()
    folders = {path.name for path in (DOCS.parent / "anomaly").glob("[a-z]*") if path.is_dir()}
    rooms = re.findall(r">(\w+)</text>", drawing[: drawing.index('class="floor"')])
    assert set(rooms) == folders - set(generate.BASEMENT)


def test_the_readme_takes_minutes_and_its_links_lead_somewhere() -> None:
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    assert len(readme.split()) <= 900
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", readme):
        assert (DOCS.parent / link).exists(), link
