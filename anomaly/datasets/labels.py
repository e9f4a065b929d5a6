"""What a name says of the parts in a folder, in a file, or in a row of a list: one vocabulary."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files

from anomaly.errors import DataError


class Label(StrEnum):
    """What a name says."""

    GOOD = "good"
    DEFECTIVE = "defective"
    ASIDE = "aside"  # no parts to learn from or to count: masks, previews, a split for tests
    UNCLEAR = "unclear"  # its words contradict each other, or say that nobody has decided yet
    UNKNOWN = "unknown"  # none of its words is known to say anything


class _Kind(StrEnum):
    """What a word does in a name."""

    GOOD, BAD = "good", "bad"
    NEGATED = "negated"  # bad, being a negation itself: NOK
    NOT = "not"  # turns the next word
    FREE = "free"  # turns the word before: defect-free
    PREFIX = "prefix"  # turns the rest of its word only: incorrect
    DOUBT = "doubt"
    MASK, ASIDE = "mask", "aside"
    STICKER = "sticker"  # label: a mask, or what is stuck on a product
    TRAIN, VALIDATION, TEST = "train", "validation", "test"
    BESIDE = "beside"  # what others are coupled with: parts, images
    PLACE = "place"  # where and when: lot, camera
    FILLER = "filler"
    NUMBER = "number"
    OTHER = "other"


# Letters of writing without spaces between words.
_CJK = "々ー぀-ヿ㐀-鿿가-힣"
_RUNS = re.compile(rf"[{_CJK}]+|(?:(?![{_CJK}])[^\W\d_])+|\d+|\?")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|.")
_ACRONYM = re.compile(r"([A-Z]{2,})([a-z]+)")
_ACCENTS = re.compile("[\u0300-\u036f\u200b-\u200f\u2019\ufeff]")
_NO = (("no", _Kind.NOT),), (("ni", _Kind.NOT),)
_UNSAID = {_Kind.NUMBER, _Kind.BESIDE, _Kind.FILLER}
_TELLING = (_Kind.GOOD, _Kind.BAD, _Kind.NEGATED)
_ZERO, _ONE = re.compile(r"(0(\.0*)?)?"), re.compile(r"1(\.0*)?")
_DIGITS = re.compile(r"\d+")
_DENYING = (_Kind.NEGATED, _Kind.NOT)
# Of random names: 3bad0f2e, where letters and digits take turns, or an UUID.
_RANDOM = re.compile(
    r"(?<![^\W_])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|(?=\d*[a-f]+\d+[a-f])[0-9a-f]{8,})(?![^\W_])",
    re.IGNORECASE,
)
_COMMON = 0.9  # share of names from which on a word in them is the product's
_LONGEST = 40  # letters of a word that is taken apart


def label_of(name: str, *, alone: bool = False) -> Label:
    """What the name of a folder or file, or a label in a list, says.

    Words may be glued, coupled by any sign, in camelCase or in any Unicode form; numbers and dates
    say nothing.

    Args:
        name: without its suffix.
        alone: other words than known ones make it unknown, as in the name of a product.
    """
    words = _joined([word for run in _RUNS.findall(_plain(name)) for word in _parsed(run)])
    letters = "".join(word for word, _ in words if not word.isdigit())
    if len(letters) <= 3 and (kind := _known(letters)) in _TELLING:  # ni.O.
        words = [(letters, kind)]
    found = {kind for _, kind in words}
    if alone and _Kind.OTHER in found:
        return Label.UNKNOWN
    if _shows_masks(found) and not (alone and _Kind.STICKER in found):
        return Label.ASIDE
    polarities, loose, open_ = _polarities(words)
    if _Kind.DOUBT in found or len(polarities) > 1:
        return Label.UNCLEAR
    if open_ and found == {_Kind.NOT}:
        return Label.UNCLEAR
    if polarities:
        sure = not (open_ or (True in polarities and (loose or _Kind.TEST in found)))
        return (Label.GOOD if polarities == {True} else Label.DEFECTIVE) if sure else Label.UNCLEAR
    aside = found & {_Kind.TEST, _Kind.ASIDE}
    return Label.ASIDE if aside and found <= aside | _UNSAID else Label.UNKNOWN


def meant_by(label: str, where: str) -> str:
    """What a label in a list says that an image is: `good`, or a kind of defect.

    Raises:
        DataError: it says neither, or both.
    """
    label = label.strip()
    if _ZERO.fullmatch(label):
        return Label.GOOD.value
    meaning = label_of(label)
    if meaning in (Label.UNCLEAR, Label.ASIDE) or not any(map(str.isalnum, label)):
        raise DataError(
            f"{where}: the label {label!r} doesn't say whether the image is good; write `good` or "
            "a kind of defect, or remove the line"
        )
    return (
        Label.GOOD.value if meaning is Label.GOOD else "defect" if _ONE.fullmatch(label) else label
    )


def only_places(name: str) -> bool:
    """Whether a name says where or when at most: numbers, dates, lots, cameras."""
    return _kinds(name) <= _UNSAID | {_Kind.TRAIN, _Kind.VALIDATION, _Kind.PLACE}


def says_masks(name: str) -> bool:
    """Whether a folder's name is that of masks."""
    return _shows_masks(_kinds(name))


def split_of(name: str) -> str:
    """The split whose images a folder holds by its name; empty where it names none."""
    kinds = _kinds(name)
    split = kinds & {_Kind.TRAIN, _Kind.VALIDATION, _Kind.TEST}
    return split.pop().value if len(split) == 1 and kinds <= split | _UNSAID else ""


def _shows_masks(kinds: set[_Kind]) -> bool:
    return _Kind.MASK in kinds or kinds - {_Kind.NUMBER} == {_Kind.STICKER}


def _kinds(name: str) -> set[_Kind]:
    return {kind for run in _RUNS.findall(_plain(name)) for _, kind in _parsed(run)}


def by_file_names(stems: Sequence[str]) -> dict[str, Label]:
    """Label of each file by its name.

    Words in nine of ten names are the product's (`hole_plate_1`) and say nothing, unless one of
    them denies that parts are good (`NOK_1`). Nor do random names of hexadecimal digits.
    """
    # Few forms, however many files there are.
    forms = {stem: _DIGITS.sub("0", _RANDOM.sub("", stem)) for stem in stems}
    words = {form: _RUNS.findall(_plain(form)) for form in set(forms.values())}
    counts = Counter(word for form in forms.values() for word in set(words[form]))
    common = {word for word, count in counts.items() if count >= _COMMON * len(stems)}
    denies = any(kind in _DENYING for word in common for _, kind in _parsed(word))
    labels: dict[str, Label] = {}
    for silent in (set(), set() if denies else common):
        labels = {
            form: label_of(" ".join(word for word in own if word not in silent))
            for form, own in words.items()
        }
        if {Label.GOOD, Label.DEFECTIVE} <= set(labels.values()):
            break
    return {stem: labels[form] for stem, form in forms.items()}


def _plain(name: str) -> str:
    """One form for all Unicode spellings: no accents, no wide letters."""
    bare = _ACCENTS.sub("", unicodedata.normalize("NFKD", name)).replace("'", "")
    return unicodedata.normalize("NFC", bare).replace("ł", "l").replace("Ł", "L")


def _words() -> dict[str, _Kind]:
    """The kind of each word that is known; of several kinds the first one."""
    words: dict[str, _Kind] = {}
    text = files("anomaly.datasets").joinpath("assets", "words.txt").read_text("utf-8")
    for section in text.split("\n[")[1:]:
        kind, _, entries = section.partition("]")
        for entry in entries.split():
            stem, _, endings = entry.partition(":")
            for ending in endings.split(","):
                words.setdefault(_plain(stem + ending), _Kind(kind))
    return words


_WORDS = _words()


def _known(word: str) -> _Kind | None:
    for spelling in (word, re.sub("([aou])e", r"\1", word)):  # beschaedigt
        if kind := _WORDS.get(spelling):
            return kind
    singular = _WORDS.get(word.removesuffix("s")) if word not in ("ios", "kos") else None
    return singular if singular in _TELLING else None


@lru_cache(maxsize=10_000)
def _parsed(run: str) -> tuple[tuple[str, _Kind], ...]:
    """The words of a run of letters or digits, and what each does."""
    if run.isdigit():
        return ((run, _Kind.NUMBER),)
    if run == "?":
        return ((run, _Kind.DOUBT),)
    low = run.casefold()
    if kind := _known(low):
        return ((low, kind),)
    if re.match(f"[{_CJK}]", run):
        return _taken_apart(low, whole=False) or ((low, _Kind.OTHER),)
    acronym = _ACRONYM.fullmatch(run)
    if acronym and (kind := _known(acronym[1].casefold())):
        return ((acronym[1].casefold(), kind), *_parsed(acronym[2]))
    parts = _CAMEL.findall(run)
    if len(parts) > 1 and all(len(part) == 1 or _known(part.casefold()) for part in parts):
        return tuple(word for part in parts for word in _parsed(part))
    if glued := _taken_apart(low, whole=True):
        return glued
    if len(parts) > 1:
        return tuple(word for part in parts for word in _parsed(part))
    if any(_WORDS.get(low[i:]) is _Kind.BAD for i in range(1, len(low) - 5)):  # Lackkratzer
        return ((low, _Kind.BAD),)
    return ((low, _Kind.OTHER if len(low) > 1 else _Kind.NUMBER),)


def _taken_apart(text: str, *, whole: bool) -> tuple[tuple[str, _Kind], ...]:
    """Known words that a text is glued from, as few as can be.

    Args:
        text: in small letters.
        whole: nothing may be left over; else that counts as other words.
    """
    if len(text) > _LONGEST:
        return ()
    least = 2 if whole else 1
    best: list[tuple[int, tuple[tuple[str, _Kind], ...]] | None] = [(0, ())]
    for end in range(1, len(text) + 1):
        options = []
        for start in range(end):
            before, word = best[start], text[start:end]
            if before is None:
                continue
            kind = _known(word) if len(word) >= least else None
            if word == "n" and start == 0:  # ngut
                kind = _Kind.NOT
            if kind not in (None, _Kind.FILLER):  # de + fault
                twice = kind is _Kind.NEGATED and before[1][-1:] in _NO  # non-ok, not no-nok
                options.append((before[0] + 1 + twice, (*before[1], (word, kind))))
            elif not whole and len(word) == 1:
                options.append((before[0] + 9, (*before[1], (word, _Kind.OTHER))))
        best.append(min(options, key=lambda option: option[0]) if options else None)
    words = best[-1][1] if best[-1] else ()
    return tuple(
        (word, _Kind.NOT if kind is _Kind.PREFIX and (*after, "")[0] != "ordnung" else kind)
        for (word, kind), after in zip(words, (*words[1:], ()), strict=False)
    )


def _joined(words: list[tuple[str, _Kind]]) -> list[tuple[str, _Kind]]:
    """Letters that stand alone, read as one word: n.i.O."""
    joined: list[tuple[str, _Kind]] = []
    i = 0
    while i < len(words):
        end = i
        while end < len(words) and len(words[end][0]) == 1 and words[end][0].isalpha():
            end += 1
        letters = "".join(word for word, _ in words[i:end])
        ends = ((k, e) for k in range(len(letters)) for e in range(len(letters), k + 1, -1))
        start, stop = next((at for at in ends if _known(letters[slice(*at)])), (len(letters), 0))
        joined += words[i : i + start]
        if start < len(letters):
            joined += _parsed(letters[start:stop])
            joined += words[i + stop : end]
        if end == i:
            joined.append(words[i])
            end += 1
        i = end
    return joined


def _polarities(words: Sequence[tuple[str, _Kind]]) -> tuple[set[bool], bool, bool]:
    """What words say, good (True) and defective (False); and whether a negation turns nothing.

    Such a one is between other words, or at the end.
    """
    polarities: list[bool] = []
    negated = loose = False
    for i, (word, kind) in enumerate(words):
        after, following = words[i + 1] if i + 1 < len(words) else ("", None)
        if kind is _Kind.NOT and not (word == "no" and following is _Kind.NUMBER):  # No. 5
            loose |= negated
            negated = True
        elif word == "n" and following is _Kind.GOOD:
            negated = True
        elif kind in _TELLING:
            good = kind is _Kind.GOOD
            polarities += [True, False] if negated and kind is _Kind.NEGATED else [good != negated]
            negated = False
        elif kind is _Kind.FREE and (polarities or word != "less"):  # defect-free, free of defects
            if polarities:
                polarities[-1] = not polarities[-1]
            negated |= not polarities
        elif kind is _Kind.PREFIX:
            turns = following is _Kind.GOOD and after != "ordnung"
            loose |= turns and word == "in"  # in good order, or in-acceptable
            negated |= turns and word != "in"
        elif kind not in (_Kind.FILLER, _Kind.NUMBER):
            loose |= negated
            negated = False
    return set(polarities), loose, negated
