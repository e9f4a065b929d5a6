"""What folders' names say of the images in them: good ones, or defects, masks and test splits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
GOOD_WORDS = frozenset(("good", "ok", "normal", "io", "gut", "gute", "pass", "passed", "healthy"))
_MASKS = frozenset(("mask", "masks", "gt", "truth", "groundtruth"))
_NEGATIONS = frozenset(("no", "not", "non"))
_NOT_GOOD = re.compile(
    "defect(s|ive)?|defekte?|fehler|fault(s|y)?|flaws?|bad|ko|ng|nok|nio|fail(ed|ures?)?|"
    "reject(s|ed)?|scrap|anomal(y|ies|ous)|abnormal|tests?|testing|masks?|gt|truth|groundtruth"
)
# What names are coupled with: `bad_parts`, `test_public`, `ground_truth`.
_BESIDE = re.compile(
    "ground|public|private|mixed|set|data|split|types?|parts?|images?|imgs?|samples?|pictures?"
)


def says_not_good(name: str) -> bool:
    """Whether a folder's name is that of defects, of masks or of a test split.

    All of its words have to be: `bad_parts`, `test_public`, `not-ok`, but not `no_defects` or
    `test_line_3`.
    """
    words = _words(name)
    telling = {word for word in words if not _BESIDE.fullmatch(word)}
    if words & _NEGATIONS:
        return bool(words & GOOD_WORDS) and telling <= GOOD_WORDS | _NEGATIONS
    return bool(telling) and all(map(_NOT_GOOD.fullmatch, telling))


def says_good(name: str) -> bool:
    """Whether a folder's name is that of good images."""
    words = _words(name)
    return bool(words & GOOD_WORDS) and not (
        words & _NEGATIONS or any(map(_NOT_GOOD.fullmatch, words))
    )


def says_masks(name: str) -> bool:
    """Whether a folder's name is that of masks."""
    return bool(_words(name) & _MASKS)


def first_not_good(folders: Iterable[Path], top: Path) -> Path | None:
    """The first folder that doesn't look like good images by its name, or its neighbours'.

    Beside a folder `good`, others mean something else.

    Args:
        folders: that hold images, inside `top` or `top` itself.
        top: its own name counts; those of the folders around it don't.
    """
    known = {f for folder in folders for f in (folder, *folder.parents) if f.is_relative_to(top)}
    beside_good = {folder.parent for folder in known - {top} if says_good(folder.name)}
    for folder in sorted(known):
        if says_not_good(folder.name):
            return folder
        if folder != top and folder.parent in beside_good and not says_good(folder.name):
            return folder
    return None


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}
