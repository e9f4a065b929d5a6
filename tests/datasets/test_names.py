"""What names mean, in the languages of the trade; and that nothing is learned by mistake."""

import random
import unicodedata
from pathlib import Path

import pytest
from kit import touch

from anomaly.datasets.inputs import check_inputs, find_inputs
from anomaly.datasets.layouts import Recognised, open_dataset, recognise
from anomaly.datasets.names import Label, by_file_names, label_of
from anomaly.datasets.samples import Dataset
from anomaly.errors import DataError
from anomaly.files.writing import write

GOOD = """good|GOOD|Goods|OK|okay|o.k.|IO|i.O.|iO|i_o|pass|PASSED|accepted|normal|intact
nominal|golden|reference|gut|Gute Teile|in Ordnung|inOrdnung|Gutteile|IO-Teile|良品|合格
正常|OK品|양품|bueno|buena|bon|bonnes|conforme|buono|aprovado|dobre|годные|good_2024-05
01_OK|OK parts|OKParts|lot7_OK|OK(2)|No5_OK|OK_cam1|годный|no_defects|defect-free
fehlerfrei|undamaged|ＯＫ|train_good|good_side_A|OK_Kamera1|PASS 2024-05-01|Gutteile_Los7
bonnes pièces|хороший|합격|aceptado"""
DEFECTIVE = """NG|NOK|NIO|nIO|nOK|niO|n.i.O.|n.i.O|n-i-O|N_O_K|n_ok|N OK|not_ok|NotOK|not-ok
notok|un_ok|unOK|nichtOK|nicht in Ordnung|nicht_io|kein Gut|not good|no good
non_conforme|no-conforme|no_bueno|pas bon|pas_conforme|nPass|不良|不合格|不良品|ＮＧ|NG品|불량
lot7_NG|2024_NG_cam1|noks|bad|defects|defective|anomaly|abnormal|broken|damaged
scratch|deep scratch|crack|dent|stain|hole|rework|rejected|failed|scrap|Ausschuss
AUSSCHUẞ|Fehler|defekt|schlecht|Kratzer|Kratzer_tief|Risse|Nacharbeit|beschädigt|rebut
défaut|cassé|rayado|scarto|refugo|缺陷|欠陥|割れ|キズ|ｷｽﾞ|划痕|брак|def_front|ab-normal|坏|불량품|плохой"""
ASIDE = """test_line_3|masks|Masken|ground_truth|GroundTruth|マスク|labels|test|Testdaten|測試
prueba|Testing|test_public|thumbnails|xyz|gt"""
PLACE = """2024-05-01|lot7|cam1|A|kamera links|Charge 12|01|___"""
UNCLEAR = """良品画像|ohne Fehler|unbroken|non_defective|sin defectos|sans défaut|無欠陥|无缺陷
異常なし|キズなし|gut geprüft|bueno_lote3|good labels|not very good|非良品|良品以外
不OK|негодные|deepscratch|Lackkratzer|false_ok|falseOK|ok_or_nok|good_scratch|maybe_ok|good?
almost good|semi_ok|OK_NG|no_NG|rework_ok|bedingt_io|not_sure_ok|review|unclear
unlabeled|未検査|缺陷无|scratch_none|Gutteile_defekt|good_but_scratched|pass_fail|undef
test_good|yes|false|stainless steel|ok_masks"""
UNKNOWN = """nogood|ungood|OKteile|senza difetti|优等品|Freigabe|bez wad|nonconforming|incorrect
unacceptable|inacceptable|disapproved|NGparts|NOKteile|NOKbracket|NGs|beschaedigt|Löcher|dañado
cam1_n.i.O._A|cam1_i.O._A|oxidation|verkratzt|in_acceptable|合否|良否|Juni|widget|contest|brook|token
notebook|combined|no_cap|ios|kos1|bottle|改|breakfast box|blister"""
NAMES = {
    label: names.replace("\n", "|").split("|")
    for label, names in (
        (Label.GOOD, GOOD),
        (Label.DEFECTIVE, DEFECTIVE),
        (Label.UNCLEAR, UNCLEAR),
        (Label.UNKNOWN, UNKNOWN),
        (Label.ASIDE, ASIDE),
        (Label.PLACE, PLACE),
    )
}


def test_names_in_every_spelling() -> None:
    wrong = {}
    for label, name in ((label, name) for label, names in NAMES.items() for name in names):
        coupled = {name.replace(" ", sign) for sign in " _-."}
        forms = {unicodedata.normalize(form, n) for n in coupled for form in ("NFC", "NFD")}
        forms |= {f"2024-05_{n}" for n in coupled if label is not Label.ASIDE} | {f"{name} 3"}
        wrong |= {form: label_of(form) for form in forms if label_of(form) is not label}
    assert wrong == {}


def test_the_name_of_a_product_says_nothing_of_its_parts(tmp_path: Path) -> None:
    assert label_of("hole_plate") is Label.DEFECTIVE
    touch(tmp_path, "hole_plate/1.png", "NG_2024/1.png")
    assert _as_folder(tmp_path / "hole_plate")
    with pytest.raises(DataError, match="NG_2024 would be taken as good"):
        _as_folder(tmp_path / "NG_2024")


FILE_NAMES = [
    ("1 2_hole", "", "2_hole"),
    ("1 2_OK", "2_OK", ""),
    ("broken_large_3 scratch-02 NOK_17 7 8 9", "", "broken_large_3 scratch-02 NOK_17"),
    ("scratch_1 dent_2", "", "scratch_1 dent_2"),
    ("ok_1 not_ok_1", "ok_1", "not_ok_1"),
    ("NOK_1 NOK_2", "", "NOK_1 NOK_2"),
    ("not_ok_1 not_ok_2", "", "not_ok_1 not_ok_2"),
    # The product says nothing: its name stands in nine of ten names.
    ("hole_1 hole_2", "", ""),
    ("OK_1 2_OK", "OK_1 2_OK", ""),
    (" ".join(f"hole_{i}" for i in range(9)) + " x", "", ""),
    ("hole_1 hole_2 hole_3 x", "", "hole_1 hole_2 hole_3"),
    ("hole_plate_good_1 hole_plate_bad_2", "hole_plate_good_1", "hole_plate_bad_2"),
    # Nor do random names.
    ("12bad4fa-p1 x_png.rf.0c7def12ab98 2bad81c7-4bad-4c1d-9def-0123456789ab", "", ""),
    ("20240501bad 2", "", "20240501bad"),
]


def test_names_of_files_say_what_they_show() -> None:
    for names, good, defective in FILE_NAMES:
        labels = by_file_names(names.split())
        assert [n for n, label in labels.items() if label is Label.GOOD] == good.split()
        assert [n for n, label in labels.items() if label is Label.DEFECTIVE] == defective.split()


SYSTEM = [".cache", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found", "__MACOSX", "@Recycle"]


def _layout(draw: random.Random, root: Path) -> tuple[dict[Path, Label], dict[Path, Label]]:
    """A folder as somebody may have it.

    Returns:
        What each image is, and what the folders hold whose names don't tell.
    """

    def spelt(label: Label) -> str:
        name = draw.choice(NAMES[label]).replace(" ", draw.choice(" _-."))
        name = draw.choice([name, f"{name}_{draw.randint(1, 31):02}", f"2024-05-{name}"])
        return unicodedata.normalize(draw.choice(["NFC", "NFD"]), name)

    truth: dict[Path, Label] = {}
    unsaid: dict[Path, Label] = {}
    wanted = [Label.GOOD] * draw.randint(1, 2) + [Label.DEFECTIVE] * draw.randint(0, 3)
    wanted += draw.choice([[], [], [Label.UNKNOWN], [Label.UNCLEAR]])
    above = Path(*draw.choice([(), (), ("lot 7",), ("train",)]))
    masks = [above / "masks"] if draw.random() < 0.2 else []
    for label in wanted:
        folder = above / spelt(label)
        if folder in {path.parent for path in truth}:
            continue
        real = draw.choice([Label.GOOD, Label.DEFECTIVE])
        if label in (Label.UNKNOWN, Label.UNCLEAR):
            unsaid[folder] = real
        else:
            real = label
        inner = Path(*draw.choice([(), (), ("cam1",), ("2024-05-01",)]))
        truth |= {folder / inner / f"{i}.png": real for i in range(6)}
    # As Synology has it: a folder for each image.
    hidden = draw.choice(list(truth)).parent / draw.choice(SYSTEM) / "0.png/SYNOPHOTO_THUMB_M.jpg"
    touch(root, *map(str, (*truth, *(mask / "x.png" for mask in masks), hidden)))
    return truth, unsaid


def _opened(found: Recognised, scratch: Path) -> Dataset:
    if not found.listing:
        return open_dataset(found.layout, found.root)
    write(scratch, found.listing)
    return open_dataset("csv", scratch)


def test_no_layout_is_learned_or_counted_wrongly(tmp_path: Path) -> None:
    for seed in range(60):
        _check_layout(random.Random(seed), tmp_path / str(seed) / "part")


def _check_layout(draw: random.Random, root: Path) -> None:
    truth, unsaid = _layout(draw, root)
    good = {root / path for path, label in truth.items() if label is Label.GOOD}
    bad = {root / path for path in truth} - good

    def is_right(dataset: Dataset) -> None:
        learned = {s.path for s in (*dataset.train, *dataset.validation)}
        defects = {s.path for s in dataset.test if s.is_defect}
        assert learned | {s.path for s in dataset.test} == good | bad
        assert defects == bad
        assert not learned & bad

    def answer(question: str) -> str:  # as somebody who knows
        return next(real for folder, real in unsaid.items() if str(root / folder) in question)

    if unsaid:
        with pytest.raises(DataError, match="don't say"):
            recognise(root)
        with pytest.raises(DataError, match="don't say"):
            open_dataset("good_defect", root)
        is_right(_opened(recognise(root, ask=answer), root.with_name("list.csv")))
    else:
        is_right(_opened(recognise(root), root.with_name("list.csv")))
        is_right(open_dataset("good_defect", root))
    for take in (_as_folder, _as_inputs):
        try:
            learned = take(root)
        except DataError:
            assert bad or unsaid or any("masks" in p.parts for p in root.rglob("*"))
        else:
            assert not unsaid
            assert learned == good


def _as_folder(root: Path) -> set[Path]:
    return {sample.path for sample in open_dataset("folder", root).train}


def _as_inputs(root: Path) -> set[Path]:
    paths = find_inputs([root]).paths
    check_inputs([root], paths)
    return set(paths)
