"""What names of folders and files mean, in whole commands."""

from pathlib import Path

import pytest
from conftest import FAST, Says, write_part
from kit import touch

from anomaly import fit
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import DataError

SETTINGS = [part for setting in FAST for part in ("--set", setting)]
CONFIG = ["--config", "folder.yaml", *SETTINGS]


def _parts(folder: Path, count: int, seed: int = 0, name: str = "{}.png") -> Path:
    for i in range(count):
        mark = (30, 40) if seed else None
        write_part(folder / name.format(i), seed=seed + i, mark=mark)
    return folder


def test_names_of_files_that_tell_are_taken_at_their_word(says: Says, tmp_path: Path) -> None:
    root = _parts(tmp_path / "part", 10, name="OK_{}.png")
    _parts(root, 3, seed=100, name="NOK_{}.png")
    check = [*CONFIG, "--set", f"data.root={root}"]
    said = says(0, "check", check)
    names = "10 images are good by the names of their files, 3 defective"
    assert all(text in said for text in ("8 good, 0 defective", "2 good, 3 defective", names))
    with pytest.raises(DataError, match=r"3 of 13 files say defective \(NOK_0\.png, "):
        fit(root)
    write_part(root / "new.png", seed=50)
    said = says(2, "check", check)
    assert ("names of these files don't say" in said, "new.png" in said) == (True, True)


def test_what_a_system_keeps_beside_images_is_never_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = _parts(tmp_path / "share" / "parts", 8)
    system = ("@eaDir/0.png", "#recycle", "$RECYCLE.BIN", ".ipynb_checkpoints", "lost+found")
    for name in (*system, "System Volume Information", "__MACOSX", "@Recycle", "#snapshot"):
        _parts(root / "lot 1" / name, 1, seed=100)
    touch(root, "._0.png", "Thumbs.db")
    inputs = [root, root / "lot 1" / "@eaDir"]  # as a shell's `*` gives them
    assert len(find_inputs(inputs).paths) == 8
    assert "as files of the system" in caplog.text
