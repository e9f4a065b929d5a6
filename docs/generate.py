"""What the documentation takes from the code: settings, the drawing of rooms, figures.

    python docs/generate.py    # writes docs/settings.md anew

`make docs` loads it as MkDocs' hooks: pages that lie outside docs/ (the change log, the benchmarks)
join the site, and `<!-- name -->` in a page becomes what is generated under that name.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # MkDocs runs from anywhere
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

# Files of the repository that the site shows, by their place in it.
OUTSIDE = {
    "benchmarks.md": "benchmarks/RESULTS.md",
    "choices.md": "benchmarks/ACCURACY.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "data.md": "data/README.md",
    "LICENSE.txt": "LICENSE",
}
OUTSIDE |= {
    f"notebooks/{file.stem}.md": f"examples/notebooks/{file.name}"
    for file in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
}
# Pages of the menu's production part, where they are written.
IN_PRODUCTION = {
    "On the line": "line.md",
    "The service": "service.md",
    "A model in other engines": "deployment.md",
    "Many machines": "scale.md",
}
MORE = {
    "data.format": "own-data.md#data-sets",
    "image.bit_depth": "own-data.md#kinds-of-file",
    "image.region": "own-data.md#where-to-look",
    "image.ignore": "own-data.md#where-to-look",
    "image.tile": "own-data.md#where-to-look",
    "image.align": "moving-parts.md",
    "model.image_score": "how/maps.md",
    "model.halo_damping": "how/maps.md",
    "model.spacing_neighbours": "how/patchcore.md",
    "model.search": "how/patchcore.md#search",
    "model.dimensions": "how/padim.md",
    "calibration.reject_rate": "thresholds.md",
    "calibration.review_rate": "thresholds.md",
    "precision": "reproducibility.md#precision-belongs-to-the-model",
}
INTRODUCTION = """\
# Settings

<!-- Written by `python docs/generate.py` from anomaly/config/schema.py; edit that. -->

For anybody who writes a config. `--set key=value` overrides any key. A config may build on another one (`base: base/mvtec_ad.yaml`). A name without a folder is looked up in the working directory, in its `configs/`, and among the configs of the program:

- `folder.yaml` and (with timm's networks) `dinov2_448.yaml` and `dinov2_672.yaml`, for your own images;
- one config for each MVTec AD category with PatchCore's published settings (for PaDiM's add `--set model.kind=padim --set model.image_score=map_max`);
- `sample_brushed_plate.yaml`, for the sample set.

```yaml
name: my_part
data:
  format: folder
  root: /path/to/good/images
image:
  area: 320
model:
  coreset_ratio: 0.02
```

In Python, the same keys are a dict; see [anomaly from Python](python.md#learn).
"""  # noqa: E501


def settings_page() -> str:
    """The page of settings, as Markdown: a table for each section of the schema."""
    from anomaly.config import schema

    said = _attribute_docstrings(ast.parse(inspect.getsource(schema)))
    described = schema.Config.model_json_schema()
    parts = [INTRODUCTION]
    top: list[str] = []
    for name, field in described["properties"].items():
        section = _reference(field, described)
        if section is None:
            top.append(_row(name, field, said["Config"][name]))
        else:
            parts.append(_section(name, section, described, said))
    for kind, (title, key, about) in SHARED_SECTIONS.items():
        rows = []
        for name, field in described["$defs"][kind]["properties"].items():
            rows.append(_row(f"{key}.{name}", field, said[kind][name]))
        parts.append("\n".join([f"## {title}", "", about, "", *HEAD, *rows]) + "\n")
    parts.insert(1, "\n".join(["## The whole", "", *HEAD, *top]) + "\n")
    return "\n".join(parts)


# What several settings take, or a setting several times: its title, key, and what it is for.
SHARED_SECTIONS = {
    "ShapeConfig": (
        "A region",
        "…",
        "`image.region` and `image.ignore` take either a picture or polygons.",
    ),
    "SmallestConfig": (
        "A smallest defect",
        "model.smallest_defect",
        "[More](false-rejects.md#the-smallest-defect).",
    ),
}
HEAD = ["| key | value | default | |", "|---|---|---|---|"]


def _section(name: str, title: str, described: dict[str, Any], said: dict[str, Any]) -> str:
    fields = described["$defs"][title]["properties"]
    rows = [_row(f"{name}.{key}", field, said[title][key]) for key, field in fields.items()]
    return "\n".join([f"## {name}", "", *HEAD, *rows]) + "\n"


def _reference(field: dict[str, Any], described: dict[str, Any]) -> str | None:
    """The section that a field holds, for those of the whole config."""
    inside = field.get("$ref", field.get("allOf", [{}])[0].get("$ref", ""))
    return inside.rpartition("/")[2] or None


def _row(key: str, field: dict[str, Any], about: str) -> str:
    shown = "" if field.get("default") in (None, [], {}) else _code(field["default"])
    more = f" [More]({MORE[key]})." if key in MORE else ""
    return f"| `{key}` | {_values(field)} | {shown} | {' '.join(about.split())}{more} |"


def _values(field: dict[str, Any]) -> str:
    """Which values a field takes, in words."""
    kinds = [k for k in field.get("anyOf", []) if k.get("type") != "null"] or [field]
    if len(kinds) > 1:
        return " or ".join(map(_values, kinds))
    kind = kinds[0]
    if "enum" in kind:
        return ", ".join(_code(value) for value in kind["enum"])
    for name, (title, *_) in SHARED_SECTIONS.items():
        if f"/{name}'" in str(kind):
            return f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    words = {"integer": "whole number", "number": "number", "string": "text", "array": "list",
             "boolean": "`true`, `false`"}  # fmt: skip
    limits = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}",
              "exclusiveMaximum": "below {}"}  # fmt: skip
    text = "path" if kind.get("format") == "path" else words[kind["type"]]
    return " ".join([text, *(w.format(_number(kind[k])) for k, w in limits.items() if k in kind)])


def _number(value: float) -> str:
    return "2⁶³" if value == 2**63 else f"{value:,}".replace(",", "\u202f")


def _code(value: object) -> str:
    if isinstance(value, bool):
        return f"`{value}`".lower()
    return f"`{value}`" if isinstance(value, str) else _number(value)  # type: ignore[arg-type]


def _attribute_docstrings(tree: ast.Module) -> dict[str, dict[str, str]]:
    """The text below each annotated attribute of each class."""
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(said))
                    ):
                        found.setdefault(node.name, {})[name] = said
    return found


def figures() -> str:
    """What the reports' figures mean, from the words that the reports themselves use."""
    from anomaly.report.report import glossary

    return "\n".join(f"| `{name}` | {text} |" for name, text in glossary().items())


# What every room may stand on, so that arrows to it would say nothing.
BASEMENT = ("runtime", "files")


def rooms() -> str:
    """The rooms of the package as a drawing: floors as the contract has them, arrows as imported.

    A room is a folder. An arrow that follows from two others (a to b, b to c) is left out, so that
    the rest is legible.
    """
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    layers = contract["tool"]["importlinter"]["contracts"][0]["layers"]
    named = ([name for name in re.findall(r"\w+", layer) if _is_room(name)] for layer in layers)
    floors = [floor for floor in named if floor]
    arrows = imports_of_rooms({room for floor in floors for room in floor})
    place = {
        room: (140 + (i + 0.5) * 860 / len(floor), 30 + 78 * level)
        for level, floor in enumerate(floors)
        for i, room in enumerate(floor)
    }
    lines = []
    for start, ends in sorted(arrows.items()):
        for end in sorted(_direct(start, ends, arrows)):
            (x0, y0), (x1, y1) = place[start], place[end]
            y0, y1 = y0 + 17, y1 - 17
            bend = (y1 - y0) / 2
            lines.append(f'<path d="M{x0:.0f} {y0}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} '
                         f'{y1 - bend:.0f} {x1:.0f} {y1}"/>')  # fmt: skip
    for room, (x, y) in place.items():
        lines.append(f'<rect x="{x - 58:.0f}" y="{y - 17}" width="116" height="34" rx="6"/>'
                     f'<text x="{x:.0f}" y="{y + 5}">{room}</text>')  # fmt: skip
    names = ["annexes", "", *(f"floor {n}" for n in range(len(floors) - 2, 0, -1))]
    lines += [f'<text class="floor" x="8" y="{35 + 78 * n}">{name}</text>'
              for n, name in enumerate(names)]  # fmt: skip
    size = f'viewBox="0 0 1010 {60 + 78 * (len(floors) - 1)}"'
    title = "<title>Rooms of the package and their imports</title>"
    return f'<div><svg class="rooms" role="img" {size}>{title}{"".join(lines)}</svg></div>'


def _is_room(name: str) -> bool:
    return name not in BASEMENT and (ROOT / "anomaly" / name).is_dir()


def imports_of_rooms(names: set[str]) -> dict[str, set[str]]:
    """Which rooms each room imports, wherever in its modules the import stands but for types."""
    import grimp

    graph = grimp.build_graph("anomaly", exclude_type_checking_imports=True)
    found: dict[str, set[str]] = {name: set() for name in names}
    for module in graph.modules:
        start = f"{module}.".split(".")[1]
        for imported in graph.find_modules_directly_imported_by(module) if start in names else ():
            if (end := f"{imported}.".split(".")[1]) in names - {start}:
                found[start].add(end)
    return found


def _direct(start: str, ends: set[str], arrows: dict[str, set[str]]) -> set[str]:
    """The ends that can't be reached over another one."""
    return ends - {far for near in ends - {start} for far in _below(near, arrows)}


def _below(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [*arrows[start]]
    while waiting:
        if (room := waiting.pop()) not in found:
            found.add(room)
            waiting += arrows[room]
    return found


GENERATED = {"rooms": rooms, "figures": figures}


def notebook_page(notebook: dict[str, Any], source: str) -> str:
    """A notebook with its outputs, as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            said = "".join(output.get("text") or data["text/plain"]).rstrip()
            picture = data.get("image/jpeg")
            shown = f'<img alt="{said}" src="data:image/jpeg;base64,{picture}">'
            parts.append(shown if picture else f"```text\n{said}\n```")
    parts.insert(1, f"*As a notebook: `{source}`*")
    return "\n\n".join(parts) + "\n"


def on_config(config: MkDocsConfig) -> None:
    """Put the pages on production that are written into the menu."""
    menu = next(part["In production"] for part in config.nav if "In production" in part)  # type: ignore[union-attr]
    there = (Path(config.docs_dir) / name for name in IN_PRODUCTION.values())
    menu += [{title: page.name} for title, page in zip(IN_PRODUCTION, there, strict=True)
             if page.is_file()]  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages."""
    from mkdocs.structure.files import File

    for name, source in OUTSIDE.items():
        text = (ROOT / source).read_text("utf-8")
        if source.endswith(".ipynb"):
            text = notebook_page(json.loads(text), source)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and let links between pages hold on the site as on disk."""
    here = page.file.src_uri
    source = Path(OUTSIDE.get(here, f"docs/{here}"))

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        lies = (ROOT / source.parent / target).resolve()
        if ":" in target or not target or not lies.is_relative_to(ROOT):
            return found[0]
        inside = lies.relative_to(ROOT).as_posix()
        on_site = {outside: name for name, outside in OUTSIDE.items()} | {"README.md": "index.md"}
        wanted = on_site.get(inside, inside.removeprefix("docs/"))
        return f"]({'../' * here.count('/')}{wanted}{anchor})"

    markdown = re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", link, markdown)
    for name, make in GENERATED.items():
        if (mark := f"<!-- {name} -->") in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


if __name__ == "__main__":
    (ROOT / "docs" / "settings.md").write_text(settings_page(), "utf-8")
