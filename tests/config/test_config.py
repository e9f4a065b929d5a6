"""Settings: defaults, bases, overrides, and messages for every mistake."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY
from pydantic import BaseModel

from anomaly.config.load import GONE, load_config
from anomaly.config.schema import METHODS, Config
from anomaly.errors import AnomalyError, ConfigError

CONFIGS = REPOSITORY / "configs"


def _write(folder: Path, text: str, name: str = "part.yaml") -> Path:
    file = folder / name
    file.write_text(text, "utf-8")
    return file


def test_every_shipped_config_is_valid_and_mvtecs_carry_the_papers_setting() -> None:
    mvtec = []
    for file in sorted(CONFIGS.glob("*.yaml")):
        for kind in METHODS:
            config = load_config(file.name, [f"model.kind={kind}"])
            assert (config.name, config.model.kind) == (file.stem, kind)
        if file.stem.startswith("mvtec_"):
            mvtec.append(config)
            assert config.data.category == file.stem.removeprefix("mvtec_")
            assert config.backbone.name == "wide_resnet50_2"
            assert (config.image.resize, config.image.crop) == (256, 224)
            assert config.model.coreset_ratio == 0.1
            assert config.model.image_score == "max"
    assert len(mvtec) == 15


def test_a_base_may_be_one_that_comes_with_the_program(tmp_path: Path) -> None:
    file = _write(tmp_path, "base: base/mvtec_ad.yaml\ndata: {category: bottle}")
    assert load_config(file).data.format == "mvtec"
    (tmp_path / "base").mkdir()
    _write(tmp_path, "data: {format: folder}", "base/mvtec_ad.yaml")  # its own place comes first
    assert load_config(file).data.format == "folder"


def test_overrides_win_over_file_over_base(tmp_path: Path) -> None:
    _write(tmp_path, "seed: 1\nmodel: {coreset_ratio: 0.5, spacing_neighbours: 7}", "base.yaml")
    file = _write(tmp_path, "base: base.yaml\nmodel: {coreset_ratio: 0.25}")
    config = load_config(file, ["model.kind=padim", "backbone.layers=[layer1, layer2]"])
    assert config.seed == 1
    assert config.model.coreset_ratio == 0.25
    assert config.model.spacing_neighbours == 7
    assert config.model.kind == "padim"
    assert config.backbone.layers == ("layer1", "layer2")
    assert load_config(file, ["image.resize=64", "image.crop=null"]).image.crop is None
    assert load_config(file, ["model.coreset_ratio=1e-2"]).model.coreset_ratio == 0.01


def test_what_the_method_and_the_size_decide() -> None:
    assert Config().image_score_in_force == "map_top_percent"
    one_aspect = []
    for kind in METHODS:
        for image in ({}, {"resize": 256}, {"resize": 256, "crop": 224}):
            values = {"model": {"kind": kind, "image_score": "max"}, "image": image}
            config = Config.model_validate(values)
            assert config.image_score_in_force == "max"
            one_aspect += [(kind, image)] if config.one_aspect else []
    assert one_aspect == [("padim", {})]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sede: 3", "unknown key 'sede'; did you mean 'seed'?"),
        ("model: {coreset_rato: 0.1}", "unknown key 'model.coreset_rato'; did you mean"),
        ("model: {coreset_ratio: 2}", "model.coreset_ratio is 2: must be 1 or less"),
        ("model: {kind: patchcor}", "model.kind is 'patchcor'"),
        ("model: {embedding: levels}", "model.embedding is 'levels': must be 'sharp' or 'concat'"),
        ("model: 3", "model is 3"),
        ("image: {crop: 224}", "image.crop needs image.resize"),
        ("image: {resize: 64, crop: 224}", "image.crop is 224, larger than image.resize (64)"),
        ("image: {tile: 128, resize: 64}", "exclude each other"),
        ("image: {region: {polygons: [[[0, 0], [1, 1]]]}}", "at least 3"),
        ("image: {region: {polygons: [[[0, 0], [20, 0], [20, 20]]]}}", "corner is 20; give shares"),
        ("image: {region: {polygons: [[[0, 0], [-1, 0], [0, 1]]]}}", "corner is -1; give shares"),
        ("image: {region: {}}", "either `png` or `polygons`"),
        ("image: {region: {pgn: a.png}}", "did you mean 'png'"),
        ("name: a/b", "name is 'a/b'"),
        ("name: ..", "name is '..': must be a name, without / and \\ and with no dot in front"),
        ("data: {category: [a, b]}", "data.category as a list is no longer supported; train a "),
        ("data: {category: 3}", "data.category is 3: must be text (put it in quotes)"),
        ("seed: -1", "seed is -1"),
        ("- a\n- b", "must hold `key: value` lines"),
        pytest.param("[" * 5000, " line 1: this is nested too deep", id="deep"),
        ("seed: &a 1\nname: *a", " line 2: this has the alias *a; write its value"),
        ("model: {kind: padim, image_score: reweighted}", "reweighted needs model.kind=patchcore"),
        pytest.param("#" * 1_000_001, "this is longer than 1,000,000 bytes", id="long"),
        ("\nname: !!python/name:os.system", "line 2, column 7: this isn't valid YAML"),
        ("seed: 010", "line 1: 010 isn't a plain number; write it in at most 40 digits"),
        ("model: {smoothing: 1:30.5}", "isn't a plain number"),
        pytest.param(f"seed: {'9' * 6000}", "isn't a plain number", id="6000 digits"),
        ("model: {smoothing: .nan}", "model.smoothing is nan: must be a finite number"),
        ("seed: 2020-01-01", "seed is '2020-01-01': must be a whole number"),
        ("model:\n\tkind: padim", " line 2, column 1: this isn't valid YAML"),
        ("seed: 1\nname: a\ab", " line 2: this isn't valid YAML"),
        ("model: {kind: padim, kind: padim}", "line 1: kind is also in line 1"),
        ("? [a, b]\n: 1", "isn't valid YAML"),
        ("image:\n  area: 96\nseed: 1\nimage:\n  tile: 512", "line 4: image is also in line 1"),
        pytest.param(f"base: {'x' * 5000}", "there is no base xxx", id="long base"),
        ("base: nowhere.yaml", "there is no base nowhere.yaml"),
        ("base: part.yaml", "leads back to itself"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.kind", "must look like key=value"),
        ("=3", "must look like key=value"),
        ("model.kind=[", "isn't valid YAML"),
        ("seed=010", "isn't a plain number"),
        ("name=!!set {a}", "must be text"),
        ("model.knd=padim", "did you mean 'kind'?"),
        ("modle.kind=padim", "did you mean 'model'?"),
    ],
)
def test_mistakes_in_an_override_are_named(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_write(tmp_path, ""), [override])
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"--set {override}")


@pytest.mark.parametrize("entry", GONE)
def test_what_went_is_refused_with_what_to_do_instead(tmp_path: Path, entry: str) -> None:
    key, _, value = entry.partition("=")
    says = f"{entry} is no longer supported; {GONE[entry]}"
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(_write(tmp_path, ""), [f"{key}={value or 1}"])
    text = str(value or 1)
    for name in reversed(key.split(".")):
        text = f"{{{name}: {text}}}"
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(_write(tmp_path, text))


def _leaves(section: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield above + name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _leaves(inner, f"{above}{name}.")


def test_no_message_is_pydantics(tmp_path: Path) -> None:
    file = _write(tmp_path, "")
    values = ("null", "x/y", "-1", "1e400", ".nan", "[[1]]", "{}", "{a: 1}", "[]", "9" * 200)
    for key in [*_leaves(Config), "image.region.polygons", "image.ignore.png"]:
        told = []
        for value in values:
            override = f"{key}={value}"
            try:
                load_config(file, [override])
            except ConfigError as error:
                told.append((override, str(error)))
        assert told, key
        for override, message in told:
            assert all(li.strip().startswith(f"--set {override}: ") for li in message.splitlines())
            assert not re.search(r"nput should|pydantic|tuple|\bdict|valid|can't be used", message)


def test_a_mistake_is_told_where_it_is(tmp_path: Path) -> None:
    file = _write(tmp_path, "model: {coreset_ratio: 2}\nimage: {crop: 64}")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["seed=x", "image.resize=32", "backbone.name=resnet18"])
    assert sorted(line.strip() for line in str(caught.value).splitlines()) == [
        "--set image.resize=32: image.crop is 64, larger than image.resize (32); make it equal or "
        "smaller, or leave it out",
        "--set seed=x: seed is 'x': must be a whole number",
        f"{file}: model.coreset_ratio is 2: must be 1 or less",
    ]


def test_a_missing_config_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'mvtec_bottle\.yaml'"):
        load_config("mvtec_botle.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    for nothing in ("", ".", "/"):
        with pytest.raises(ConfigError, match="is a folder"):
            load_config(nothing)
    with pytest.raises(AnomalyError, match="no home folder is known for ~nobody-here"):
        load_config("~nobody-here/x.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "binary.yaml")


def test_what_does_not_go_together_names_the_overrides_that_it_is_about(tmp_path: Path) -> None:
    file = _write(tmp_path, "")
    for override in ("image.tile=512", "model.turned_copies=quarter_turns"):
        says = f"^--set model.kind=padim, --set {override}: {override.partition('=')[0]} needs"
        with pytest.raises(ConfigError, match=says):
            load_config(file, ["seed=3", "model.kind=padim", override])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.kind=padim", "model.coreset_ratio=0.02"], "coreset_ratio=0.02 has no effect with"),
        (["model.dimensions=50"], "dimensions=50 has no effect with model.kind=patchcore: it is"),
        (["model.smallest_defect.area=9", "model.image_score=max"], "effect beside model.smallest"),
    ],
)
def test_an_override_without_effect_is_refused(
    tmp_path: Path, overrides: list[str], says: str
) -> None:
    # A base may have settings of any method.
    file = _write(tmp_path, "model: {coreset_ratio: 0.5, regularisation: 0.1}\n")
    load_config(file, ["model.kind=padim", "model.dimensions=50", "model.smoothing=2"])
    with pytest.raises(ConfigError, match=says):
        load_config(file, overrides)


def test_an_override_of_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    file = _write(tmp_path, "")
    for path in ("/data/good #2", "2024", "2024-11-25"):
        assert str(load_config(file, [f"data.root={path}"]).data.root) == path
    assert str(load_config(file, ["data.root='/data/good #2'"]).data.root) == "/data/good #2"
