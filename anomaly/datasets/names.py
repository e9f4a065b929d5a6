"""Names of folders and files, and labels in lists: good, defective, or unknown."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from anomaly.errors import DataError


class Label(StrEnum):
    """Meaning of a name for the images below it."""

    GOOD = "good"
    DEFECTIVE = "defective"
    ASIDE = "aside"  # no parts to learn from or to count: masks, previews, a split for tests
    PLACE = "place"  # where and when at most: numbers, dates, lots, cameras
    UNCLEAR = "unclear"  # its words contradict each other, or say that nobody has decided yet
    UNKNOWN = "unknown"  # other words


CLEAR = {Label.GOOD, Label.DEFECTIVE}

# The commonest words, without accents and in small letters; of two kinds the first one counts.
# A word of one letter, and the plural of a word, needn't be listed.
_WORDS = {
    "good": """good ok okay okey io pass passed accepted normal intact nominal golden reference gut
        gute guten gutteil gutteile inordnung fehlerfrei nodefect defectfree undamaged 良品 合格
        正常 良好 양품 정상 bueno buena bon bonne conforme buono buoni bom aprovado dobre годные
        годный""",
    # These aren't part of a product's name.
    "denied": "ng nok nio ko notok nichtinordnung 不良 不良品 不合格 불량 불합격",
    "flaw": """bad fail failed reject rejected scrap defect defective def anomaly anomalies abnormal
        anomalous broken damaged scratch scratches scratched crack cracked dent stain hole bent
        contamination rework fault faulty wrong ausschuss fehler fehlerhaft defekt schlecht kratzer
        riss risse nacharbeit beschadigt malo defecto rayado mauvais defaut rebut casse difetto
        scarto defeito refugo wada wady брак дефект дефекты 缺陷 次品 划痕 異常 异常 欠陥 キズ
        割れ 결함""",
    "not": "not no non n un nicht kein ohne pas ne sin sans senza nao nie не",
    "doubt": """? or maybe almost false falsch pseudo review recheck suspect unclear undecided undef
        undefined unknown unbekannt unlabeled unsorted unchecked pending todo tbd na nan none null
        mixed yes true 未検査 未检 未标注 不明 待定""",
    "mask": """mask masks masken label labels gt seg segm segmentation truth groundtruth annotation
        anno マスク 掩码""",
    "train": "train training trainingsdaten 训练 学習",
    "validation": "val valid validation 验证",
    "test": "test testing testdaten eval evaluation prueba 测试 測試 テスト",
    "aside": "thumb thumbnail preview xyz depth trash deleted",
    "place": """part piece teil teile image img bild bilder photo foto set data dataset split
        public private ground jpeg jpg png rgb default lot los batch charge cam camera
        kamera line linie station shift schicht day date week side view front back
        left right top bottom links rechts of 品""",
}
# camelCase is taken apart, and so are writings without capitals beside Latin letters.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+|\?")
# Accents, what isn't seen, and the number sign in No. 5.
_DROPPED = re.compile("[\u0300-\u036f\u200b-\u200f\u2019\ufeff]|(?<![^\\W_])No[.]?(?=\\d)")


def _plain(name: str) -> str:
    """One form for all Unicode spellings: no accents, no wide letters."""
    return unicodedata.normalize("NFC", _DROPPED.sub("", unicodedata.normalize("NFKD", name)))


_KINDS = {w: kind for kind, words in reversed(_WORDS.items()) for w in _plain(words).split()}
_BAD, _SILENT = {"denied", "flaw"}, {"place", "train", "validation"}
# Words that leave a longer one in doubt: of five letters and more, or of writings without spaces.
_TELLING = [word for word, kind in _KINDS.items() if kind in {"good", *_BAD}]
_PARTS = re.compile("|".join(w for w in _TELLING if len(w) > (4 if w.isascii() else 1)))
# Of random names: 3bad0f2e, where letters and digits take turns, or an UUID.
_RANDOM = re.compile(r"(?<![^\W_])(?=[\da-f-]*[a-f]\d+[a-f])[\da-f-]{8,}(?![^\W_])", re.IGNORECASE)
_ZERO, _ONE = re.compile(r"(0(\.0*)?)?"), re.compile(r"1(\.0*)?")
_COMMON = 0.9  # share of names from which on a word in them is the product's


def label_of(name: str, *, alone: bool = False) -> Label:
    """Meaning of the name of a folder or file, or of a label in a list.

    Words may be coupled by any sign, in camelCase or in any Unicode form. A name is good only if
    all of its words are known.

    Args:
        name: without its suffix.
        alone: other words than known ones make it unknown, as in the name of a product.
    """
    said = _kinds(name) - _SILENT
    if not said:
        return Label.PLACE
    if alone and "other" in said:
        return Label.UNKNOWN
    if said in ({"mask"}, {"test"}, {"aside"}):
        return Label.ASIDE
    if said == {"good"}:
        return Label.GOOD
    if said == {"not", "good"} or (said & _BAD and said <= {*_BAD, "other", "test"}):
        return Label.DEFECTIVE
    return Label.UNKNOWN if said <= {"not", "other", "test"} else Label.UNCLEAR


def says_masks(name: str) -> bool:
    """True if a folder's name is that of masks."""
    return _kinds(name) - _SILENT == {"mask"}


def split_of(name: str) -> str:
    """The split whose images a folder holds by its name; empty where it names none."""
    split = _kinds(name) - {"place"}
    return split.pop() if split in ({"train"}, {"validation"}, {"test"}) else ""


def meant_by(label: str, where: str) -> str:
    """Defect type of a label in a list: `good`, or a kind of defect.

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
    if meaning is Label.GOOD:
        return meaning.value
    return "defect" if _ONE.fullmatch(label) else label


def by_file_names(stems: Sequence[str]) -> dict[str, Label]:
    """Label of each file by its name.

    Words in nine of ten names are the product's (`hole_plate_1`) and say nothing, unless they deny
    that parts are good (`NOK_1`). Nor do random names of hexadecimal digits.
    """
    words = {stem: _words(_RANDOM.sub("", stem)) for stem in stems}
    counts = Counter(word for own in words.values() for word in set(own))
    silent = {
        word
        for word, count in counts.items()
        if count >= _COMMON * len(stems) and _kind(word) not in ("good", "denied", "not")
    }
    return {
        stem: label_of(" ".join(w for w in own if w not in silent)) for stem, own in words.items()
    }


def _kinds(name: str) -> set[str]:
    words = _words(name)
    together = _known("".join(words))  # n.i.O., no defects
    letters = [word for word in words if len(word) == 1]
    return {together} if together else {*map(_kind, words), *["other"][: len(letters) > 1]}


def _words(name: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(_plain(name))]


def _kind(word: str) -> str:
    """The kind of a word; in doubt where a known one is a part of it."""
    if kind := _known(word):
        return kind
    if len(word) == 1 and word.isascii():
        return "place"
    return "doubt" if _PARTS.search(word) else "other"


def _known(word: str) -> str:
    return _KINDS.get(word) or _KINDS.get(word.removesuffix("s") if len(word) > 3 else word, "")
