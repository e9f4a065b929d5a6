"""What is to be scored, and what its pictures are called."""

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import touch

from anomaly.datasets.inputs import find_inputs, picture_names
from anomaly.errors import DataError

JAPANESE = "検査画像" * 20 + "不良品"  # 83 characters, 249 bytes

_NAMES = st.text(st.characters(blacklist_characters="/\0", codec="utf-8"), min_size=1, max_size=90)
_FILES = st.lists(st.lists(_NAMES, min_size=1, max_size=3), min_size=1, max_size=6)


def _named(paths: list[Path], *inputs: Path) -> list[str]:
    """Names of pictures, each of its own, and none that of a folder of others."""
    names = picture_names(paths, inputs)
    files = {name.casefold() for name in names}
    files |= {str(Path(name).with_suffix(".tiff")).casefold() for name in names}
    assert len(files) == 2 * len(paths)
    assert files.isdisjoint(str(f).casefold() for name in names for f in Path(name).parents)
    for name in names:
        parts = Path(name).parts
        assert name.endswith(".png")
        assert not {"/", ".."} & {*parts}
        assert max(len(os.fsencode(part)) for part in (*parts, f"{parts[-1]}.tiff")) <= 255
    return names


@settings(max_examples=40)
@given(_FILES)
def test_pictures_have_names_of_their_own_that_fit(files: list[list[str]]) -> None:
    _named([Path("/data", *(part.strip(".") or "x" for part in parts)) for parts in files])


def test_short_names_are_kept_and_long_ones_told_apart() -> None:
    same = "ä" * 120
    paths = [Path("/in", n) for n in ("a.png", "b.PNG", "c.tif", f"{same}1.png", f"{same}2.png")]
    names = _named(paths)
    assert names[:3] == ["a.png", "b.png", "c.tif.png"]
    assert all(name.startswith("ä" * 100) for name in names[3:])
    assert _named(paths[3:]) == names[3:]  # whatever else there is
    (name,) = _named([Path("/in", JAPANESE, f"{JAPANESE}.bmp")], Path("/in"))
    assert name.startswith("in/検査画像")


def test_odd_paths_have_names_inside_the_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = ["x.jpg", "x.jpg.png/y.bmp", "x.jpg.tiff/y.bmp", "X.JPG.PNG/z.png", "a.tiff/b/c.png"]
    for order in (inputs, inputs[::-1]):
        _named([tmp_path / name for name in order], tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    names = _named([Path("../there/a.png"), Path("b.png"), Path("../../c.png")])
    assert [Path(name).name for name in names] == ["a.png", "b.png", "c.png"]
    odd = [Path(p) for p in ("..", "../..", "a/../..", ".", "/", "//", "//x/y.png", "z.png")]
    for paths in (odd, *([one, Path("z.png")] for one in odd), *([one] for one in odd)):
        _named(paths)


def test_a_name_that_is_taken_gets_a_number() -> None:
    taken = {"a.png", "a~2.png"}
    paths = [Path("/in/a.png"), Path("/in/A.png"), Path("/in/b.png")]
    names = picture_names(paths, [], taken.__contains__)
    assert names == ["a~3.png", "A.png", "b.png"]
    assert picture_names([Path("/in/x.png"), Path("/in/X.PNG")], []) == ["x.png", "X~2.png"]

    written, numbers = set[str](), dict[str, int]()
    for _ in range(1000):
        written.update(picture_names([Path("/in/part.png")], [], written.__contains__, numbers))
    assert written == {"part.png", *(f"part~{i}.png" for i in range(2, 1001))}
    names = picture_names([Path("/in/other.png")], [], written.__contains__, numbers)
    assert names == ["other.png"]


@pytest.mark.skipif(os.name == "nt", reason="these are its own paths")
def test_windows_paths_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lot 1").mkdir()
    for name in ("lot 1/a.png", r"b\c.png"):  # which may be a name, too
        (tmp_path / name).write_bytes(b"")
    entries = [r"lot 1\a.png", r".\lot 1/a.png", "file://lot 1/a.png", r"b\c.png", r"no\d.png"]
    meant = [Path("lot 1/a.png"), Path(r"b\c.png"), Path(r"no\d.png")]
    file = tmp_path / "list.csv"
    for text in ("{}", "{},9"):
        header = "path\n" if text == "{}" else "path,group\n"
        file.write_text(header + "".join(f"{text.format(entry)}\n" for entry in entries))
        assert find_inputs([file]).paths == sorted(meant)
    file.with_suffix(".txt").write_text("\n".join(entries))
    assert find_inputs([file.with_suffix(".txt")]).paths == sorted(meant)


def _read(encoding: str, *lines: str) -> tuple[list[str], dict[str, str]]:
    """The paths and groups in a list."""
    Path("list.csv").write_bytes("\r\n".join([*lines, ";;", ""]).encode(encoding))
    inputs = find_inputs([Path("list.csv")])
    return [str(path) for path in inputs.paths], inputs.groups


def test_lists_as_spreadsheets_save_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    encodings = ("utf-8", "utf-8-sig", "cp1252", "utf-16", "gb18030", "cp932")
    for encoding, separator in itertools.product(encodings, ([], ["sep=;"])):
        path = "Kühler, 1.png" if encoding not in ("gb18030", "cp932") else "良品、表 1.png"
        (tmp_path / path).touch()
        grouped = encoding, *separator, "path;group;", f"{path};Los 5;"
        assert _read(*grouped) == ([path], {path: "Los 5"})
        for header in ("path;label", "path;image_sha256;status", "path;image_sha256;group"):
            assert _read(encoding, *separator, header, f"{path};good") == ([path], {})
        (tmp_path / "list.txt").write_bytes(f"b, c.png\r\n{path}\r\n".encode(encoding))
        assert find_inputs([Path("list.txt")]).paths == sorted([Path("b, c.png"), Path(path)])
        (tmp_path / path).unlink()
        if encoding not in ("utf-8", "utf-8-sig", "utf-16"):
            with pytest.raises(DataError, match=r"don't tell its encoding; .* as CSV UTF-8"):
                _read(*grouped)


def test_a_list_with_wrong_columns_names_those_needed(tmp_path: Path) -> None:
    for name, text, says in (
        ("bad.csv", "file,part\na.png,1\n", "lacks the column 'path': its first line is 'file', "),
        ("bad.csv", "file\na.png\n", "must name the columns path, group"),
        ("bad.csv", "a.png;1\nb.png;1\n", "first line is 'a.png', '1'"),
        ("bad.csv", "path;part\na.png;1\n", "lacks the column 'group'"),
        ("bad.txt", "path,grop\na.png,1\n", "did you mean 'group'"),
        ("bad.csv", "path;group\na;b.png;1\n", "line 2 has more cells than the header; put paths "),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError) as caught:
            find_inputs([tmp_path / name])
        assert says in str(caught.value)
        assert str(caught.value).startswith(f"--input {tmp_path / name}")


def test_the_list_of_a_data_set_names_its_images(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label,split\nb.png,good,train\na.png,1,test\n")
    found = find_inputs([tmp_path / "list.csv"])
    assert (found.paths, found.groups) == ([tmp_path / "a.png", tmp_path / "b.png"], {})


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.png", "in/b", "in/notes.txt", "in/.hidden", "in/sub/c.x")
    folder = tmp_path / "in"
    inputs = [folder, folder / "sub", folder / "b"]
    found = find_inputs(inputs)
    assert found.paths == [folder / "a.png", folder / "b"]
    assert found.passed_over.startswith("3 files are skipped")
    assert all(name in found.passed_over for name in ("notes.txt", "c.x"))
    with pytest.raises(DataError, match=r"no images in .*sub \(1 file is skipped.*c\.x"):
        find_inputs([folder / "sub"])


def test_an_input_that_cannot_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="File name too long"):
        find_inputs([Path("x" * 300 + ".png")])
    with pytest.raises(DataError, match=r"--golden .* doesn't exist"):
        find_inputs([tmp_path / "nowhere"], option="--golden")
