"""What names mean, in the languages of the trade; and that nothing is learned by mistake."""

import unicodedata

import pytest

from anomaly.datasets.labels import Label, by_file_names, label_of, only_places

GOOD = """good|GOOD|Goods|OK|okay|o.k.|IO|i.O.|iO|i_o|pass|PASSED|accepted|normal|intact|nominal
golden|reference|gut|Gute Teile|in Ordnung|inOrdnung|Gutteile|IO-Teile|良品|合格|正常|OK品
良品画像|양품|bueno|buena|bon|bonnes|conforme|buono|aprovado|dobre|годные|good_2024-05|01_OK
OK parts|OKParts|OKteile|lot7_OK|OK(2)|No5_OK|OK_cam1|no_defects|defect-free|fehlerfrei
ohne Fehler|undamaged|unbroken|non_defective|sin defectos|sans défaut|senza difetti|無欠陥|无缺陷
異常なし|キズなし|ＯＫ|train_good"""
DEFECTIVE = """NG|NOK|NIO|nIO|nOK|niO|n.i.O.|n.i.O|n-i-O|N_O_K|n_ok|N OK|not_ok|NotOK|not-ok|notok
un_ok|unOK|nichtOK|nicht in Ordnung|nicht_io|kein Gut|not good|no good|nogood|ungood|nonconforming
non_conforme|no-conforme|no_bueno|pas bon|pas_conforme|incorrect|unacceptable|inacceptable|nPass
disapproved|not very good|不良|不合格|不良品|非良品|良品以外|不OK|ＮＧ|NG品|불량|lot7_NG
2024_NG_cam1|NGparts|NOKteile|NOKbracket|noks|NGs|bad|defects|defective|anomaly|abnormal|broken
damaged|scratch|deep scratch|crack|dent|stain|hole|rework|rejected|failed|scrap|Ausschuss|AUSSCHUẞ
Fehler|defekt|schlecht|Kratzer|Kratzer_tief|Risse|Nacharbeit|beschädigt|beschaedigt|Löcher|rebut
défaut|cassé|dañado|rayado|scarto|refugo|缺陷|欠陥|割れ|キズ|ｷｽﾞ|划痕|брак"""
UNCLEAR = """false_ok|falseOK|ok_or_nok|good_scratch|maybe_ok|good?|almost good|semi_ok|OK_NG
no_NG|rework_ok|bedingt_io|in_acceptable|not_sure_ok|review|unclear|unlabeled|未検査|合否|良否
test_good|yes|false"""
UNKNOWN = """2024-05-01|lot7|cam1|Juni|A|widget|contest|test_line_3|brook|token|notebook|combined
no_cap|ios|kamera links|Charge 12|bottle|01|改|___"""
ASIDE = """masks|Masken|gt|ground_truth|GroundTruth|ok_masks|マスク|test|Testing|test_public
thumbnails|xyz"""
NAMES = {
    label: names.replace("\n", "|").split("|")
    for label, names in (
        (Label.GOOD, GOOD),
        (Label.DEFECTIVE, DEFECTIVE),
        (Label.UNCLEAR, UNCLEAR),
        (Label.UNKNOWN, UNKNOWN),
        (Label.ASIDE, ASIDE),
    )
}


@pytest.mark.parametrize("label", NAMES)
def test_names_in_every_spelling(label: Label) -> None:
    wrong = {}
    for name in NAMES[label]:
        coupled = {name.replace(" ", sign) for sign in " _-."}
        forms = {unicodedata.normalize(form, n) for n in coupled for form in ("NFC", "NFD")}
        forms |= {f"2024-05_{n}" for n in coupled if label is not Label.ASIDE} | {f"{name} 3"}
        wrong |= {form: label_of(form) for form in forms if label_of(form) is not label}
    assert wrong == {}


def test_the_name_of_a_product_says_nothing_of_its_parts() -> None:
    assert label_of("hole_plate") is Label.DEFECTIVE
    assert label_of("hole_plate", alone=True) is Label.UNKNOWN
    assert label_of("NG_2024", alone=True) is Label.DEFECTIVE
    assert only_places("2024-05_lot 7_cam1")
    assert not only_places("2024_bent")


def test_files_are_told_by_their_names_where_both_labels_are_there() -> None:
    assert by_file_names(["1", "2_NOK", "scratch"]) is None
    assert by_file_names(["OK_1", "2_OK"]) is None
    assert by_file_names(["OK_1", "NOK_1", "x"]) == {
        "OK_1": Label.GOOD, "NOK_1": Label.DEFECTIVE, "x": Label.UNKNOWN,
    }  # fmt: skip
    assert by_file_names(["ok_1", "not_ok_1"]) == {
        "ok_1": Label.GOOD,
        "not_ok_1": Label.DEFECTIVE,
    }
    plates = by_file_names(["hole_plate_good_1", "hole_plate_bad_2"])  # the product says nothing
    assert plates is not None
    assert list(plates.values()) == [Label.GOOD, Label.DEFECTIVE]
