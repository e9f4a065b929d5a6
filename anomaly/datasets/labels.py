"""What a name says of the parts in a folder, in a file, or in a row of a list: one vocabulary."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache

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


# By language; `buen:o,a` is bueno and buena, `x:,s` is x and xs. Without accents, in small letters.
_VOCABULARY = {
    _Kind.GOOD: """
        qualified freigabe
        genugend conformit:y,e,es conformidad konformitat good ok okay okey io pass:,ed,es,ing
        accept:,ed,able approved normal nominal intact healthy golden reference:,s perfect
        flawless faultless compliant conform:,ing,ant correct clean gut:,e,er,es,en
        gutteil:,e,en gutmuster gutbild:,er ordnung einwandfrei:,e fehlerlos:,e makellos:,e
        tadellos:,e freigegeben:,e akzeptiert:,e angenommen:,e bestanden:,e unversehrt:,e
        konform:,e normale referenz:,en heil:,e buen:o,a,os,as bien correct:o,a,os,as
        aceptad:o,a,os,as aprobad:o,a,os,as apt:o,a,os,as conforme:,s normales
        intact:o,a,os,as san:o,a,os,as referencia:,s bon:,s,ne,nes correct:e,es,s
        accepte:,e,s,es normaux normale:,s sain:,s,e,es valide:,s buon:o,a,i,e conformi
        accettat:o,a,i,e idone:o,a,i,e bom bons boa:,s aprovad:o,a,os,as aceit:o,a,os,as
        dobr:y,e,a prawidlow:y,e,a годн:ый,ые,ая годен норма нормальн:ый,ые хорош:ий,ие 良品
        良 良い 良好 優良 优良 优品 合格 合格品 適合 适合 正常 正常品 完好 健全 好 好品 好的
        通过 通過 正品 一等品 优等品 無傷 无伤 标准品 標準品 양품 합격 합격품 정상 정상품 양호""",
    _Kind.NEGATED: """
        ng nok nio ko nc niok noio notok 不良 不良品 不合格 不合格品 不適合 不可 불합격 불량""",
    _Kind.BAD: """
        def pit:,s pitting pinhole:,s blowhole:,s oxid:ation,ized,ised peeling delamination
        unfit invalid insufficient malformed ncr nonconformit:y,ies dross
        verkratzt:,e untauglich:,e негодн:ый,ые
        befund:,e haarriss:e rissbildung holed abnormalities durchgefallen 欠点 bad
        fail:,ed,s,ing,ure,ures reject:,ed,s,ion,ions scrap:,ped defect:,s,ive,ives,ed
        fault:,s,y flaw:,s,ed anomal:y,ies,ous,e abnormal abnormality outlier:,s broken
        break:,s,age breakage:s damage:,d,s scratch:,es,ed crack:,s,ed dent:,s,ed stain:,s,ed
        hole:,s spot:,s chipped burr:,s chipping scuff:,s,ed tear:,s torn cut:,s bent
        bend:,s,ing deformed deformation:,s distorted warped missing misaligned misaligment
        misplaced wrong incorrect imperfect imperfection:,s contaminat:ed,ion,ions dirt dirty
        rust:,y corrosion corroded void:,s porosity bubble:,s blisters blistering inclusion:,s
        discolored discoloured discoloration discolouration burn:,t,ed leak:,s,ing,age
        rework:,ed error:,s poor worn fracture:,d,s smudge:,s,d blemish:,es,ed quarantine:,d
        waste unusable substandard spoiled schlecht:,e,er,es,en schlechtteil:,e,en fehler:,n
        fehlerhaft:,e,er,es fehlteil:,e fehlend:,e defekt:,e,en,er,es mangel mangelhaft:,e
        ausschuss ausschusse:,n schrott nacharbeit:,en nachgearbeitet verworfen:,e
        abgelehnt:,e gesperrt:,e sperrteil:,e beschadigt:,e beschadigung:,en schaden kaputt:,e
        bruch bruche gebrochen:,e riss:,e,en rissig:,e kratzer:,n zerkratzt:,e delle:,n
        fleck:,e,en loch locher grat:,e lunker pore:,n einschluss einschlusse
        verunreinig:t,te,ung,ungen verschmutz:t,te,ung,ungen schmutz verbogen:,e verformt:,e
        rost unbrauchbar:,e falsch:,e anomalie:,n,s auffallig:,e mal:,o,a,os,as defecto:,s
        defectuos:o,a,os,as fallo:,s falla:,s fallid:o,a,os,as rechazad:o,a,os,as rechazo:,s
        rot:o,a,os,as rotura:,s rayad:o,a,os,as rayadura:,s rasguno:,s grieta:,s mancha:,s
        manchad:o,a,os,as abolladura:,s abollad:o,a,os,as agujero:,s danad:o,a,os,as dano:,s
        desecho:,s chatarra inservible:,s incorrect:o,a,os,as anomalia:,s anormal:,es,e,aux
        rebaba:,s retrabajo:,s fisura:,s mauvais:,e,es defaut:,s defectueu:x,se,ses
        defaillan:t,te,ts,ce rebut:,s,e,es rejet:,s rejete:,e,s,es raye:,e,s,es rayure:,s
        fissure:,s,e,es tache:,s,e,es bosse:,s trou:,s casse:,e,s,es cassure:,s
        endommage:,e,s,es abime:,e,s,es retouche:,s ferraille dechet:,s incorrecte:,s
        bavure:,s scart:o,i difett:o,i difettos:o,a,i,e graffi:,o crepa crepe macchi:a,e
        ammaccatur:a,e buco buchi rott:o,a,i,e rottura guast:o,a,i,e danneggiat:o,a,i,e
        cattiv:o,a,i,e defeito:,s defeituos:o,a,os,as ruim ruins rejeitad:o,a,os,as refugo:,s
        sucata arranhao arranhoes trinca:,s amassad:o,a,os,as quebrad:o,a,os,as wad:,a,y
        wadliw:y,e,a uszkodzon:y,e,a zl:y,e,a braki brakow:y,e rysa rysy pekniecie odrzut:,y
        брак дефект:,ы плох:ой,ие царапин:а,ы трещин:а,ы 缺陷 缺陷品 欠陥 欠陥品 异常 異常
        異常品 异常品 次品 废品 廢品 廃品 廃棄 廃棄品 报废 報廢 瑕疵 坏 壞 坏品 划痕 劃痕 刮痕
        刮伤 刮傷 划伤 裂纹 裂紋 裂缝 裂痕 开裂 凹痕 凹坑 凹陷 污渍 污点 污漬 脏污 髒污 破损
        破損 破裂 损坏 損壞 损伤 損傷 孔洞 毛刺 变形 變形 変形 缺料 缺口 返工 返修 失败 失敗
        傷 伤 傷あり キズ きず 疵 ヒビ ひび 割れ ワレ クラック スクラッチ 汚れ ヨゴレ 打痕
        凹み へこみ ヘコミ 欠け カケ バリ 手直し シミ 穴 錆 サビ 異物 异物 불량품 결함 결함품
        스크래치 긁힘 찍힘 파손 균열 오염 이상""",
    _Kind.NOT: """
        didnt doesnt aint wasnt hasnt anti libre:,s exempt:,e,s,es esente livre:,s no not non
        none never un nicht kein:,e,er,en ohne nie without zero isnt arent isn aren cannot dis
        mis sin sans pas ne ni senza nao sem bez не без 不 非 無 无 未 没 没有 不是 ノー 비 미""",
    _Kind.FREE: """
        free frei freie less なし 無し フリー 以外 以外の ではない でない 없음""",
    _Kind.PREFIX: "in im ab il ir",
    _Kind.DOUBT: """
        ish escaped missed after formerly former once was were would expired supposed:,ly
        called disputed misjudged misclassified misclassification sure falsos falsas schein
        vermeintlich:,e angeblich:,e grenzwertig:,e ex half halb but 誤 误 误判 誤判 誤判定 偽
        伪 假 false fake pseudo pseudofehler maybe perhaps possible possibly probable probably
        almost nearly hardly barely borderline questionable doubtful suspect:,s,ed suspicious
        undef unsure uncertain unclear undecided unknown unlabeled unlabelled unsorted unchecked
        uninspected unverified unclassified undefined review recheck pending todo tbd na nan
        null mixed mix semi quasi candidate:,s than wrongly overkill escape:,s limit retest
        only yes true ja oui unbekannt:,e unklar:,e unsicher:,e unsortiert:,e ungepruft:,e
        fraglich:,e bedingt:,e fast kaum grenzfall grenzfalle grenzmuster vielleicht eventuell
        verdacht zuprufen gemischt dudos:o,a,os,as quizas casi falso falsa pendiente:,s
        desconocid:o,a,os,as sinclasificar douteu:x,se,ses peutetre presque faux fausse
        inconnu:,s,e atrier avoir dubbi:,o,a forse talvez 合否 良否 未検査 未判定 未分類
        未分类 未标注 未知 未检 待定 待检 待确认 保留 要確認 不明 不确定 过杀 漏检 見逃し 虚報
        疑似 疑问 可疑 미확인""",
    _Kind.MASK: """
        mask:,s gt truth groundtruth maske:,n mascara:,s masque:,s maschera maschere
        annotation:,s segmentation:,s 掩码 掩膜 マスク 마스크""",
    _Kind.STICKER: "label:,s seg",
    _Kind.TRAIN: """
        train:,ing lernen lerndaten trainings apprentissage entrainement entrenamiento
        addestramento treino 训练 訓練 学習 학습""",
    _Kind.VALIDATION: "val valid validation validierung validacion 验证 検証 검증",
    _Kind.TEST: """
        test:,s,ing eval evaluation prueba:,s teste:,s 测试 測試 テスト 評価 평가 테스트""",
    _Kind.ASIDE: """
        thumb:,s thumbnail:,s preview:,s vorschau vignettes trash deleted garbage papierkorb
        recycle recycler trashbox
        geloscht corbeille papelera cestino xyz depth pointcloud:,s pcd normalmap:,s 回收站
        ゴミ箱 ごみ箱 缩略图 サムネイル""",
    _Kind.BESIDE: """
        ground public private set:,s data dataset:,s split:,s type:,s part:,s piece:,s
        image:,s img:,s pic:,s picture:,s photo:,s foto:,s sample:,s item:,s unit:,s
        product:,s class classes folder:,s file:,s daten dati dados datos donnees 数据
        teil:,e,en bild:,er muster stuck stucke produkt:,e pieza:,s imagen imagenes muestra:,s
        echantillon:,s pezz:o,i peca:,s 品 件 图 图像 图片 圖片 画像 写真 样本 樣本 サンプル
        フォルダ データ 零件 部品 ワーク 사진 이미지""",
    _Kind.PLACE: """
        breakfast stainless rostfrei rustfree inox lot:,s batch:,es charge:,n los cam:,s camera:,s
        kamera:,s line:,s linie:,n station:,s shift:,s schicht:,en day:,s tag:,e date:,s datum
        week:,s kw month year:,s view:,s side:,s front back left right top bottom linea camara
        lote lotto lotti ligne equipe poste 批次 批 相机 相機 カメラ ライン ロット 号機 号机
        号 年 月 日 产线 产品 工位""",
    _Kind.FILLER: """
        of von di da so very quite really at all the a is be der die das ganz sehr la le el de
        muy tout""",
}  # fmt: skip

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
_LONGEST = 40  # letters of a word that is taken apart


def _spelt(vocabulary: str) -> Iterator[str]:
    for entry in vocabulary.split():
        stem, _, endings = entry.partition(":")
        yield from (stem + ending for ending in endings.split(","))


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
    said, loose, open_ = _polarities(words)
    if _Kind.DOUBT in found or len(said) > 1:
        return Label.UNCLEAR
    if open_ and found == {_Kind.NOT}:
        return Label.UNCLEAR
    if said:
        sure = not (open_ or (True in said and (loose or _Kind.TEST in found)))
        return (Label.GOOD if said == {True} else Label.DEFECTIVE) if sure else Label.UNCLEAR
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
    said = label_of(label)
    if said in (Label.UNCLEAR, Label.ASIDE) or not any(map(str.isalnum, label)):
        raise DataError(
            f"{where}: the label {label!r} doesn't tell whether the image is good; write `good` or "
            "a kind of defect, or remove the line"
        )
    return Label.GOOD.value if said is Label.GOOD else "defect" if _ONE.fullmatch(label) else label


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


def by_file_names(stems: Iterable[str]) -> dict[str, Label] | None:
    """What files' names say, where some say more than others.

    What all names have in common, such as that of the product, says nothing, unless it denies that
    the parts are good.

    Returns:
        The label of each; None where names tell none from others.
    """
    forms = {stem: _DIGITS.sub("0", stem) for stem in stems}  # few, however many files there are
    words = {form: _RUNS.findall(_plain(form)) for form in set(forms.values())}
    common = set.intersection(*map(set, words.values())) if words else set()
    telling = any(kind in _TELLING for word in common for _, kind in _parsed(word))
    for shared in (set(), common) if telling else (set(),):
        labels = {
            form: label_of(" ".join(word for word in own if word not in shared))
            for form, own in words.items()
        }
        said = set(labels.values())
        both = {Label.GOOD, Label.DEFECTIVE} <= said
        last = shared == (common if telling else set())
        some = last and len(said) > 1 and said & {Label.GOOD, Label.DEFECTIVE}
        if both or some or (said == {Label.DEFECTIVE} and all(map(denies, labels))):
            return {stem: labels[form] for stem, form in forms.items()}
    return None


def denies(name: str) -> bool:
    """Whether a name denies that parts are good: NOK, not good; no feature's name, such as hole."""
    return not _kinds(name).isdisjoint({_Kind.NEGATED, _Kind.NOT})


def _plain(name: str) -> str:
    """One form for all Unicode spellings: no accents, no wide letters."""
    bare = _ACCENTS.sub("", unicodedata.normalize("NFKD", name)).replace("'", "")
    return unicodedata.normalize("NFC", bare).replace("ł", "l").replace("Ł", "L")


_WORDS = {
    _plain(word): kind for kind, text in reversed(_VOCABULARY.items()) for word in _spelt(text)
}


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
    said: list[bool] = []
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
            said += [True, False] if negated and kind is _Kind.NEGATED else [good != negated]
            negated = False
        elif kind is _Kind.FREE and (said or word != "less"):  # defect-free, free of defects
            if said:
                said[-1] = not said[-1]
            negated |= not said
        elif kind is _Kind.PREFIX:
            turns = following is _Kind.GOOD and after != "ordnung"
            loose |= turns and word == "in"  # in good order, or in-acceptable
            negated |= turns and word != "in"
        elif kind not in (_Kind.FILLER, _Kind.NUMBER):
            loose |= negated
            negated = False
    return set(said), loose, negated
