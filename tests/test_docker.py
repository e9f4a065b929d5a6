"""The images' recipes: linted, and what they name exists. They are built where there is Docker."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY

from anomaly.cli import options_of

DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))


def steps(file: Path) -> list[tuple[str, str]]:
    """Each instruction and the rest of its line, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", file.read_text("utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_it_copies_is_there_and_installs_known_extras(file: Path) -> None:
    said = steps(file)
    sources = [
        source
        for name, rest in said
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert sources
    assert [source for source in sources if not (REPOSITORY / source).exists()] == []
    ignored = file.with_name(file.name + ".dockerignore")
    if ignored.exists():
        assert {f"!{source}" for source in sources} <= set(ignored.read_text().splitlines())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    extras = re.findall(r"\.\[([\w,]+)\]", file.read_text("utf-8"))
    assert extras
    for extra in ",".join(extras).split(","):
        assert extra in project["optional-dependencies"]


def test_the_service_runs_without_torch_and_without_root() -> None:
    said = steps(REPOSITORY / "docker" / "serve.Dockerfile")
    last = dict(said)  # of the last stage, which comes last
    assert re.fullmatch(r"[1-9]\d*", last["USER"])
    names = [name for name, _ in said]
    assert names.index("USER") < names.index("ENTRYPOINT")
    (extras,) = re.findall(r"\.\[([\w,]+)\]", " ".join(rest for _, rest in said))
    assert set(extras.split(",")) == {"serve", "mqtt", "onnx"}
    program, command, *arguments = json.loads(last["ENTRYPOINT"])
    assert (program, command) == ("anomaly", "serve")
    assert {one for one in arguments if one.startswith("--")} <= set(options_of("serve"))
    port = re.search(r'"--port", .*default=(\d+)',
                     (REPOSITORY / "anomaly/cli/commands.py").read_text("utf-8"))  # fmt: skip
    assert port is not None
    assert last["EXPOSE"] == port[1]
    probe = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert probe[0] == "python"
    assert f"127.0.0.1:{port[1]}/v2/health/ready" in probe[2]
    compile(probe[2], "probe", "exec")
    volumes = json.loads(last["VOLUME"])
    assert all(any(one.startswith(volume) for one in arguments) for volume in volumes)


def test_the_proxy_asks_the_service_by_its_name_and_port() -> None:
    """And nobody starts the two without a token."""
    folder = REPOSITORY / "docker"
    services = yaml.safe_load((folder / "compose.yaml").read_text("utf-8"))["services"]
    line, proxy = services["line"], services["proxy"]
    assert (folder / line["build"]["context"] / line["build"]["dockerfile"]).is_file()
    assert line["environment"]["ANOMALY_TOKEN"].startswith("${ANOMALY_TOKEN:?")
    assert "ports" not in line
    (config,) = (one.partition(":")[0] for one in proxy["volumes"])
    text = (folder / config).read_text("utf-8")
    exposed = dict(steps(folder / "serve.Dockerfile"))["EXPOSE"]
    assert f"proxy_pass http://line:{exposed};" in text
    assert f"listen {proxy['ports'][0].partition(':')[2]};" in text
