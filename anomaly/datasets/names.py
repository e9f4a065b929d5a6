"""Names of folders, files and labels: good, defective or unknown; refusal of contradictions."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from anomaly.errors import DataError, some
from anomaly.files.tables import texts_of
from anomaly.files.writing import left_by_system, own_outputs
from anomaly.imaging.read import IMAGE_SUFFIXES, is_folder


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
        годный хороший норма dobry boas aceptado 합격""",
    # These aren't part of a product's name.
    "denied": "ng nok nio ko notok nichtinordnung 不良 不良品 不合格 불량 불합격",
    "flaw": """bad fail failed reject rejected scrap defect defective def anomaly anomalies abnormal
        anomalous broken damaged scratch scratches scratched crack cracked dent stain hole bent
        contamination rework fault faulty wrong ausschuss fehler fehlerhaft defekt schlecht kratzer
        riss risse nacharbeit beschadigt malo defecto rayado mauvais defaut rebut casse difetto
        scarto defeito refugo wada wady брак дефект дефекты 缺陷 次品 划痕 異常 异常 欠陥 キズ
        割れ 결함 坏 불량품 плохой wadliwy ruim reprovado rechazado scarti anomalie""",
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


def _unaccented(name: str) -> str:
    """A name in one form for all Unicode spellings: no accents, no wide letters."""
    return unicodedata.normalize("NFC", _DROPPED.sub("", unicodedata.normalize("NFKD", name)))


_KINDS = {w: kind for kind, words in reversed(_WORDS.items()) for w in _unaccented(words).split()}
_BAD, _SILENT = {"denied", "flaw"}, {"place", "train", "validation"}
# Words that leave a longer one in doubt: of five letters and more, or of writings without spaces.
_TELLING = [word for word, kind in _KINDS.items() if kind in {"good", *_BAD}]
_PARTS = re.compile("|".join(w for w in _TELLING if len(w) > (4 if w.isascii() else 1)))
# Of random names: 3bad0f2e, where letters and digits take turns, or an UUID.
_RANDOM = re.compile(r"(?<![^\W_])(?=[\da-f-]*[a-f]\d+[a-f])[\da-f-]{8,}(?![^\W_])", re.IGNORECASE)
_ZERO, _ONE = re.compile(r"(0(\.0*)?)?"), re.compile(r"1(\.0*)?")
_COMMON = 0.9  # share of names from which on a word in them is the product's


def label_of(name: str) -> Label:
    """Meaning of the name of a folder, of a file (without suffix), or of a label in a list.

    Words may be coupled by any sign, in camelCase or in any Unicode form. A name is good only if
    all of its words are known.
    """
    kinds = _kinds(name) - _SILENT
    if not kinds:
        return Label.PLACE
    if kinds in ({"mask"}, {"test"}, {"aside"}):
        return Label.ASIDE
    if kinds == {"good"}:
        return Label.GOOD
    # Defects are only tested with, so `test` beside them is no doubt; beside `good` it is one.
    if kinds == {"not", "good"} or (kinds & _BAD and kinds <= {*_BAD, "other", "test"}):
        return Label.DEFECTIVE
    return Label.UNKNOWN if kinds <= {"not", "other", "test"} else Label.UNCLEAR


def says_masks(name: str) -> bool:
    """True if a folder's name is that of masks."""
    return _kinds(name) - _SILENT == {"mask"}


def split_of(name: str) -> str:
    """`train`, `validation` or `test` if a folder's name says no more than that; else empty."""
    split = _kinds(name) - {"place"}
    return split.pop() if split in ({"train"}, {"validation"}, {"test"}) else ""


def defect_type_of(label: str, where: str) -> str:
    """Defect type: `good` for a label that is empty, `0` or good, `defect` for `1`, or the label.

    Raises:
        DataError: the label doesn't say, or is contradictory; the message names `where` it is.
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
    """Labels of files by their names without suffixes.

    Words in nine of ten names are the product's (`hole_plate_1`) and say nothing, unless they call
    parts good or deny it (`NOK_1`). Random names of hexadecimal digits say nothing either.
    """
    words = {stem: _words(_RANDOM.sub("", stem)) for stem in stems}
    counts = Counter(word for in_name in words.values() for word in set(in_name))
    silent = {
        word
        for word, count in counts.items()
        if count >= _COMMON * len(stems) and _kind(word) not in ("good", "denied", "not")
    }
    return {
        stem: label_of(" ".join(word for word in in_name if word not in silent))
        for stem, in_name in words.items()
    }


def _kinds(name: str) -> set[str]:
    """Kinds, as in `_WORDS`, of the words of a name, and `other` for unknown words."""
    words = _words(name)
    if together := _known("".join(words)):  # n.i.O., no defects
        return {together}
    initials = sum(len(word) == 1 for word in words) > 1  # they may say anything
    return {*map(_kind, words)} | ({"other"} if initials else set())


def _words(name: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(_unaccented(name))]


def _kind(word: str) -> str:
    """The kind of a word; `doubt` where a known word is a part of it."""
    if kind := _known(word):
        return kind
    if len(word) == 1 and word.isascii():
        return "place"
    return "doubt" if _PARTS.search(word) else "other"


def _known(word: str) -> str:
    """The kind of a listed word or of its plural; empty for others."""
    return _KINDS.get(word) or _KINDS.get(word.removesuffix("s") if len(word) > 3 else word, "")


# Labels that a folder inside one of good images, or of defective ones, mustn't have.
_CONTRARY = {
    Label.GOOD: {*Label} - {Label.GOOD, Label.PLACE},
    Label.DEFECTIVE: {Label.GOOD, Label.ASIDE},
}
_TEXTS = {".json", ".jsonl", ".ndjson", ".manifest", ".xml", ".txt", ".csv", ".tsv"}
_MOST_READ = 2**24  # bytes of a text
# Texts about a whole data set, which may name an image as an example.
_ABOUT = re.compile(r"read.?me|licen[cs]e|copying|notice|change.?log|citation", re.IGNORECASE)
# Folders of images and of annotations, as labelling tools and data sets name them.
_IMAGES = re.compile(r"(jpeg)?(image|img|picture|photo)s?", re.IGNORECASE)
_ANNOTATIONS = re.compile(
    r"anno?s?|annotations?|box(es)?|bbox(es)?|labels?|labeltxt|jsons?|xmls?|voc|yolo|coco|gt",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"""["',;:<>=\[\](){}|\t\r\n]+""")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_UPLOADED = re.compile(r"[0-9a-f]{8}-")  # what Label Studio puts before a name


def check_names(images: Sequence[Path], folder: Path, wanted: Label) -> None:
    """Refuse images in a folder if names contradict their wanted label, good or defective.

    Good images may lie in folders of good names, or of numbers, lots and cameras; where some lie in
    a folder that is named as good, all have to.
    """
    top = absolute(folder)
    holding = {absolute(image.parent) for image in images}
    folders = {f for inner in holding for f in (inner, *inner.parents) if f.is_relative_to(top)}
    labels = {f: label_of(f.name) for f in folders}
    if "other" in _kinds(top.name) or labels.get(top) not in {*CLEAR, Label.ASIDE}:
        labels[top] = Label.PLACE  # a product's name, `hole plate`, says nothing of its parts
    # Named as good, or inside such a folder.
    good = {f for f in folders if Label.GOOD in {labels.get(g) for g in (f, *f.parents)}}
    contrary = {f for f in folders if labels[f] in _CONTRARY[wanted]}
    if wanted is Label.GOOD and good:
        contrary |= holding - good
    if contrary:
        first = min(contrary)
        all_in = "" if first == top else f", like all in {top}"
        raise DataError(
            f"the images in {first} would be taken as {wanted}{all_in}, but that folder's name "
            f"doesn't say so. Move them elsewhere, rename that folder (`{wanted} …`), or sort "
            "images by folders (data.format=good_defect) or in a list (data.format=csv)"
        )
    check_files(images, folder, wanted)


def check_files(images: Sequence[Path], folder: Path, wanted: Label) -> None:
    """Refuse images in a folder if their files' names contradict the wanted label."""
    named = by_file_names([path.stem for path in images])
    (contrary,) = CLEAR - {wanted}
    if others := [path.name for path in images if named[path.stem] is contrary]:
        raise DataError(
            f"the images in {folder} would all be taken as {wanted}, but the names of "
            f"{len(others)} of {len(images)} files say {contrary} ({some(others)}): move those "
            "elsewhere, or rename them"
        )


def undecided(folder: Path, names: Sequence[str], what: str = "folders") -> DataError:
    """The error of folders, or files, whose names don't tell good from defective."""
    return DataError(
        f"{folder}: the names of these {what} don't say whether images are good or defective: "
        f"{some(names)}. Rename them (`good …`, `defect …`), move them elsewhere, or list the "
        "images in a CSV file with the columns path and label (data.format=csv)"
    )


def check_annotations(good: Sequence[Path], folder: Path) -> None:
    """Refuse good images that text files beside them name: those may call them defective.

    A file names images by its own name (`1.json`, even empty) or in its text, whatever its format.
    Names without a suffix count if they have letters; mere numbers if they name half of a folder's
    images. `folder` is the data set's.
    """
    # Images by their folder and their name without suffix, folded.
    by_folder: dict[Path, dict[str, set[Path]]] = {}
    for image in map(absolute, good):
        by_folder.setdefault(image.parent, {}).setdefault(folded(image.stem), set()).add(image)
    # Each folder is listed, and each text read, once.
    listed, mentions = cache(files_in), cache(_mentions)
    named: dict[Path, set[Path]] = defaultdict(set)
    for place, images in by_folder.items():
        for text in _texts_around(place, absolute(folder), listed):
            named[text] |= _named_by(text, images, mentions)
    naming = sorted(filter(named.get, named), key=lambda text: (-len(named[text]), text))
    if naming:
        names = sorted({image.name for images in named.values() for image in images})
        verb, them = ("names", "this file") if len(naming) == 1 else ("name", "these files")
        raise DataError(
            f"{some([*map(str, naming)])} {verb} {len(names)} of {len(good)} images that would "
            f"be taken as good ({some(names)}). Annotations aren't read, and may call some "
            "defective: write a CSV list with the columns path and label and use that "
            f"(data.format=csv), or move {them} away"
        )


def _texts_around(
    place: Path, folder: Path, listed: Callable[[Path], list[Path]]
) -> Iterator[Path]:
    """Text files in a folder of images, in those around it, and in folders of annotations there.

    Outside of the data set's folder only annotations count, and only where it is named like images
    or a split, as `images/train` has `labels/train`. `listed` is a cached `files_in`.
    """
    top = folder
    while _is_of_images(top) or _is_of_images(top.parent):
        top = top.parent
    for around in (p for p in (place, *place.parents) if p.is_relative_to(top)):
        # Folders around the data set may be closed to its user.
        entries = listed(around) if os.access(around, os.R_OK) else []
        annotations = [entry for entry in entries if _ANNOTATIONS.fullmatch(entry.stem)]
        texts = entries if around.is_relative_to(folder) else annotations
        for beside in annotations:
            texts = [*texts, *listed(beside), *listed(beside / place.name)]
        yield from (t for t in texts if t.suffix.lower() in _TEXTS and not _ABOUT.match(t.name))


def _is_of_images(folder: Path) -> bool:
    """True if a folder is named like images (`JPEGImages`) or a split."""
    return bool(_IMAGES.fullmatch(folder.name) or split_of(folder.name))


def files_in(folder: Path) -> list[Path]:
    """Entries of a folder, sorted, without the system's and this program's; none without a folder.

    Raises:
        DataError: it can't be listed.
    """
    try:
        entries = sorted(folder.iterdir()) if is_folder(folder) else []
    except OSError as error:
        raise DataError(f"{folder} can't be listed ({error.strerror})") from None
    own = own_outputs(folder, [entry.name for entry in entries])
    return [e for e in entries if e.name not in own and not left_by_system(e.name)]


def _named_by(
    text: Path, images: Mapping[str, set[Path]], mentions: Callable[[Path], set[str]]
) -> set[Path]:
    """Images of a folder, by `_stem`, that a text file names; `mentions` returns its words."""
    if named := images.get(_stem(text.stem)):
        return named
    named, numbers = set[Path](), set[Path]()
    for mention in mentions(text):
        meant = images.get(stem := _stem(mention), set())
        place = absolute(text.parent / mention)
        if meant and os.path.lexists(place):  # the path of a file: another one may have this name
            meant = meant & {place}
        is_number = stem.isdecimal() and not mention.lower().endswith(tuple(IMAGE_SUFFIXES))
        (numbers if is_number else named).update(meant)
    return named | numbers if 2 * len(numbers) >= sum(map(len, images.values())) else named


def _stem(mention: str) -> str:
    """Name of the file that a path on any machine means, without an image's suffix, folded."""
    name = _UPLOADED.sub("", mention.rpartition("/")[2], count=1)
    bare, _, suffix = name.rpartition(".")
    return folded(bare if f".{suffix.lower()}" in IMAGE_SUFFIXES else name)


def _mentions(file: Path) -> set[str]:
    """Words of a text file's first 16 MiB that may be names, with forward slashes."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_READ)
    except OSError:  # a folder, or not ours to read
        return set()
    text = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), "\n".join(texts_of(data)))
    parts = {part.strip() for part in _BETWEEN.split(unquote(text).replace("\\", "/"))}
    return parts.union(*(part.split() for part in parts if " " in part))


def absolute(path: Path) -> Path:
    """An absolute path without `..`; its root is one slash (POSIX lets two be another)."""
    return Path(os.path.abspath(path).replace("//", "/"))  # noqa: PTH100, links stay


def folded(name: str) -> str:
    """A name in small letters and one form of Unicode."""
    return unicodedata.normalize("NFC", name).casefold()
