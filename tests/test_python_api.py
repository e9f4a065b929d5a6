"""The library as a Python program uses it; docs/python.md teaches it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import PYTHONPATH, REPOSITORY, draw_part, write_part, write_product
from kit import bgr, rgb, tiny
from PIL import Image as Pil

import anomaly
from anomaly.datasets.samples import Sample
from anomaly.errors import ConfigError, DataError, ModelError, OutputError

PAGE = REPOSITORY / "docs" / "python.md"
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
TINY = tiny()


def part(seed: int, mark: bool = False) -> np.ndarray:
    return draw_part(seed, (30, 50) if mark else None)[..., ::-1].copy()


@pytest.fixture(scope="module")
def detector() -> anomaly.Detector:
    return anomaly.fit([rgb(part(seed)) for seed in range(12)], TINY, device="cpu")


def test_every_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(10):
        write_part(tmp_path / "good" / f"{i:03}.png", seed=i)
        write_part(tmp_path / "more_good" / f"{i:03}.png", seed=50 + i)
    write_part(tmp_path / "part.png", seed=99, mark=(30, 40))
    write_part(tmp_path / "camera" / "a.png", seed=31)
    (tmp_path / "camera" / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n cut short")
    write_part(tmp_path / "camera" / "c.png", seed=32)
    write_product(tmp_path / "disc", n_train=1)
    snippets = SNIPPET.findall(PAGE.read_text())
    assert len(snippets) == 11
    assert all(name in PAGE.read_text() for name in anomaly.__all__)
    names: dict[str, object] = {}
    for snippet in snippets:
        code = snippet.replace('"timm/tf_efficientnet_lite2"', '"tiny", "weights": "random"')
        exec(compile(code, str(PAGE), "exec"), names)
    assert (tmp_path / "why" / "explanation.json").is_file()
    assert (tmp_path / "model_recalibrated" / "manifest.json").is_file()
    assert next((tmp_path / "evaluation").rglob("report.html")).is_file()


def test_the_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plates = write_product(tmp_path / "data/sample/brushed_plate", n_train=8)
    for folder in ("test", "ground_truth"):
        (plates / folder / "spot").rename(plates / folder / "scratch")
    (snippet,) = SNIPPET.findall((REPOSITORY / "README.md").read_text())
    names: dict[str, Any] = {}
    exec(snippet.replace('"timm/tf_efficientnet_lite2"', '"tiny", "weights": "random"'), names)
    assert names["prediction"].verdict == "good"
    assert names["picture"].shape == (96, 120, 3)


def test_an_array_scores_as_the_lossless_file_of_its_pixels(
    detector: anomaly.Detector, tmp_path: Path
) -> None:
    colour = part(40, mark=True)
    colour += np.random.default_rng(1).integers(0, 5, colour.shape).astype(np.uint8)
    deep = colour.astype(np.uint16) * 257 + 3
    for pixels, name in ((colour, "8.png"), (colour[..., 1], "grey.tiff"), (deep, "16.tiff"),
                         (deep[..., 1], "16.png")):  # fmt: skip
        file = tmp_path / name
        cv2.imwrite(str(file), pixels[..., ::-1] if pixels.ndim == 3 else pixels)
        one, other = detector.predict(file), detector.predict(rgb(pixels))
        assert one.score == other.score, name
        np.testing.assert_array_equal(one.anomaly_map, other.anomaly_map)
        np.testing.assert_array_equal(one.heatmap(), other.heatmap())
        assert one.image is None  # a prediction of a file keeps no pixels
        assert other.image is not None
    listed = detector.predict([file, rgb(pixels), str(file)])
    assert len({p.score for p in listed}) == 1
    assert [p.path for p in listed] == [file, None, file]
    assert [p.index for p in listed] == [0, 1, 2]
    assert [one.path for one in detector.stream(str(file))] == [file]
    buffer = deep.copy()  # of a camera, which uses it again
    found = detector.predict(rgb(buffer))
    buffer[:] = 0
    np.testing.assert_array_equal(found.heatmap(), detector.predict(rgb(deep)).heatmap())


def test_every_way_to_give_an_image(detector: anomaly.Detector) -> None:
    pixels = part(41, mark=True)
    expected = detector.predict(rgb(pixels)).score
    planes = torch.from_numpy(pixels).permute(2, 0, 1)
    unit = pixels.astype(np.float32) / np.float32(255)
    given = [
        anomaly.image(pixels[..., ::-1], channels="bgr"),
        rgb(pixels.astype(np.float64), full_scale=255),
        rgb(pixels.astype(np.uint16) * 16, full_scale=16 * 255),
        Pil.fromarray(pixels),
        anomaly.image(planes, layout="CHW"),
        anomaly.image(planes.permute(1, 2, 0), layout="HWC"),
        rgb(unit, full_scale=1.0),
    ]
    scores = [detector.predict(image).score for image in given]
    assert scores == pytest.approx([expected] * len(scores), rel=1e-6)
    assert scores[:6] == [expected] * 6
    grey = pixels[..., 0]
    same = [
        detector.predict(grey).score,
        detector.predict(grey[..., None]).score,
        detector.predict(Pil.fromarray(grey)).score,
        detector.predict(anomaly.image(torch.from_numpy(grey), layout="HW")).score,
    ]
    assert len(set(same)) == 1
    assert [p.score for p in detector.predict(np.stack([grey, grey])[..., None])] == [
        p.score for p in detector.predict([grey, grey])
    ]


def test_pil_images_are_what_their_files_are(detector: anomaly.Detector, tmp_path: Path) -> None:
    pixels = part(42, mark=True)
    exif = Pil.Exif()
    exif[0x0112] = 6  # turned by a quarter
    alpha = np.dstack([pixels, np.full(pixels.shape[:2], 128, np.uint8)])
    sixteen = pixels[..., 0].astype(np.uint16) * 257
    Pil.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    Pil.fromarray(pixels).save(tmp_path / "turned.tiff", exif=exif)
    Pil.fromarray(alpha).save(tmp_path / "alpha.png")
    Pil.fromarray(sixteen).save(tmp_path / "sixteen.png")
    Pil.fromarray(pixels).quantize(16).save(tmp_path / "palette.png")
    clear = tuple(pixels[0, 0].tolist())
    Pil.fromarray(pixels).save(tmp_path / "clear.png", transparency=clear)
    for file in sorted(tmp_path.iterdir()):
        assert detector.predict(Pil.open(file)).score == detector.predict(file).score, file


@pytest.mark.parametrize(
    ("image", "options", "says"),
    [
        (np.zeros((40, 40)), {}, "full_scale=1.0"),
        (np.full((40, 40), 2.0), {"full_scale": 1.0}, "from 2 to 2"),
        (np.full((40, 40), np.nan), {"full_scale": 1.0}, "not a number"),
        (np.zeros((40, 40), np.int64), {}, "int64"),
        (np.zeros((40, 40, 2), np.uint8), {}, "40 × 40 × 2"),
        (np.zeros((40, 40, 4), np.uint8), {}, "alpha"),
        (np.zeros((3, 40, 40), np.uint8), {}, "layout='CHW'"),
        (np.zeros((0, 40), np.uint8), {}, "no pixels"),
        (np.full((40, 40), 9000, np.uint16), {"full_scale": 4095}, "to 9000, not from 0 to 4095"),
        (np.zeros((40, 40, 3), np.uint8), {}, "channels='bgr'"),
        (np.zeros((3, 40, 40), np.float32), {"layout": "CHW", "full_scale": 1}, "channels='rgb'"),
        (torch.zeros(3, 40, 40), {}, "layout='CHW'"),
        (Pil.new("CMYK", (40, 40)), {}, r"convert\('RGB'\)"),
        (None, {}, "NoneType"),
        ("missing.png", {}, "missing.png"),
        (b"no path", {}, "bytes can't be used"),
        (io.BytesIO(b"no path"), {}, "BytesIO can't be used"),
        (Path("tests"), {}, "tests"),
    ],
)
def test_what_cannot_be_used_says_why(
    detector: anomaly.Detector, image: object, options: dict[str, object], says: str
) -> None:
    with pytest.raises(anomaly.ImageError, match=says):
        detector.predict(anomaly.image(image, **options) if options else image)  # type: ignore


def test_options_that_mean_nothing_are_errors(run_folder: Path) -> None:
    for ask, error, says in (
        (lambda: anomaly.image(part(0), channels="gbr"), DataError, "channels is 'gbr'"),
        (lambda: anomaly.image(part(0), full_scale=0), DataError, "full_scale is 0"),
        (lambda: anomaly.load(run_folder, "cpu", "fp16"), ModelError, "give 'fp32' or 'bf16'"),
        (lambda: anomaly.load(run_folder, "gpu7"), anomaly.AnomalyError, "'auto', 'cpu' or 'cuda'"),
    ):
        with pytest.raises(error, match=says):
            ask()


def test_a_list_names_the_image_that_is_wrong_and_a_stream_goes_on(
    detector: anomaly.Detector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture at all, whatever its name says")
    images = [rgb(part(1)), broken, np.zeros((5, 5, 5, 5)), rgb(part(2))]
    with pytest.raises(anomaly.ImageError, match=r"broken\.png"):
        detector.predict(images)
    told: list[tuple[object, anomaly.ImageError]] = []
    listed = detector.stream(images, on_error=lambda *what: told.append(what))
    found = list(listed)
    assert sorted(one.index for one in found) == [0, 3]
    # What shares a batch may move a last digit.
    expected = [p.score for p in detector.predict([rgb(part(1)), rgb(part(2))])]
    assert [one.score for one in found] == pytest.approx(expected, rel=1e-6)
    (first, why), (second, shape) = told
    assert first is broken
    assert second is images[2]
    assert "broken.png" in str(why)
    assert "image 2: its shape 5 × 5 × 5 × 5" in str(shape)
    list(detector.stream([broken]))
    assert "broken.png" in caplog.text
    assert detector.predict([]) == []


def test_eight_threads_give_what_one_gives(detector: anomaly.Detector, tmp_path: Path) -> None:
    pictures = [part(seed, mark=seed % 2 == 0) for seed in range(60, 68)]
    files = [tmp_path / f"{i}.png" for i in range(len(pictures))]
    for file, picture in zip(files, pictures, strict=True):
        cv2.imwrite(str(file), picture[..., ::-1])
    images = [
        file if i % 3 == 0 else rgb(picture)
        for i, (file, picture) in enumerate(zip(files, pictures, strict=True))
    ]
    alone = [detector.predict(image) for image in images]
    lists = [p.score for p in detector.predict(images)]
    with ThreadPoolExecutor(8) as pool:
        several = pool.submit(detector.predict, images)
        together = list(pool.map(detector.predict, images))
    assert [p.score for p in together] == [p.score for p in alone]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.anomaly_map, other.anomaly_map)
    assert [p.score for p in several.result()] == lists


def test_a_prediction_says_and_shows_what_there_is(
    detector: anomaly.Detector, tmp_path: Path
) -> None:
    file = tmp_path / "part.png"
    cv2.imwrite(str(file), part(43, mark=True)[..., ::-1])
    found = detector.predict(file)
    assert found.path == file
    assert found.verdict == "reject"
    assert found.calibrated_score > 0
    assert found.anomaly_map.shape == (96, 120)
    assert found.anomaly_map.dtype == np.float32
    assert found.mask.dtype == bool
    assert sum(region.area for region in found.regions) == found.mask.sum() > 0
    assert "part.png: reject, score" in repr(found)
    assert repr(replace(found, reason="brightness 0.1")).endswith("; brightness 0.1>")
    assert len(repr(found)) < 200
    assert found._repr_png_().startswith(b"\x89PNG")
    assert found.heatmap().shape == (96, 120, 3)
    bare = replace(found, thresholds=None)
    assert (bare.verdict, bare.calibrated_score) == ("", None)
    with pytest.raises(ModelError, match="calibrate"):
        _ = bare.mask
    write_part(file, seed=5)
    with pytest.raises(anomaly.ImageError, match="was changed"):
        found.heatmap()
    file.unlink()
    assert found._repr_png_() is None


def test_saved_and_loaded_it_is_the_same_model(detector: anomaly.Detector, tmp_path: Path) -> None:
    model_id = detector.save(str(tmp_path / "model"))
    loaded = anomaly.load(str(tmp_path / "model"), device="cpu")
    assert loaded.model_id == model_id
    image = rgb(part(45))
    assert loaded.predict(image).score == detector.predict(image).score
    assert loaded.save(tmp_path / "again") == model_id
    assert "12 good images" in repr(loaded)
    with pytest.raises(OutputError, match="exists already"):
        loaded.save(tmp_path / "again")
    other = loaded.calibrate(threshold=9.0)
    assert other.save(tmp_path / "again", overwrite=True) != model_id
    again = anomaly.load(tmp_path / "again", device="cpu")
    assert (again.thresholds.image, again.thresholds.label) == (9.0, "by hand")


def test_what_is_learned_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(8):
        write_part(tmp_path / "good" / "day" / f"{i}.png", seed=i)
    (tmp_path / "good" / "text.png").write_bytes(b"no picture")
    options = {"device": "cpu", "calibrate": False}
    config = anomaly.Config.model_validate(TINY)
    of_folder = anomaly.fit(str(tmp_path / "good"), config, **options)  # type: ignore[arg-type]
    assert next(iter(of_folder.manifest["training_images"])) == "day/0.png"
    assert "text.png" in caplog.text
    paths = sorted((tmp_path / "good" / "day").iterdir())
    of_paths = anomaly.fit(paths, TINY, **options)  # type: ignore[arg-type]
    arrays = [bgr(cv2.imread(str(path))) for path in paths]
    of_arrays = anomaly.fit(arrays, TINY, **options)  # type: ignore[arg-type]
    image = rgb(part(46))
    assert of_paths.predict(image).score == of_arrays.predict(image).score
    # With a broken file among them, images share other batches, which may move a last digit.
    score = of_folder.predict(image).score
    assert score == pytest.approx(of_paths.predict(image).score, rel=1e-6)
    assert of_paths.predict(image).verdict == ""


@pytest.mark.parametrize(
    ("images", "config", "error", "says"),
    [
        ([], None, DataError, "no images"),
        (part(0), None, DataError, "list of good images"),
        ([part(0)], {"modell": {}}, ConfigError, "unknown key 'modell'"),
        ([part(0)], "folder.yaml", ConfigError, "load_config"),
        ([part(0)[..., 0], np.zeros((4, 4))], TINY, anomaly.ImageError, "image 1: .*full_scale"),
        ("nowhere", TINY, DataError, "nowhere doesn't exist"),
        ([Sample(Path("a"), "one"), Sample(Path("b"), "one")], TINY, DataError, "2 .* name 'one'"),
    ],
)
def test_what_cannot_be_learned_from(
    images: object, config: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        anomaly.fit(images, config, device="cpu")  # type: ignore[arg-type]


def test_calibration_by_arrays_and_its_refusals(detector: anomaly.Detector) -> None:
    good = [rgb(part(seed)) for seed in range(80, 90)]
    more = [*good, good[0], rgb(part(0))]
    other = detector.calibrate(more, reject_rate=0.2, review_rate=0.2, force=True)
    assert other.thresholds.images == 10  # a copy, and one that it has learned from, are left out
    assert detector.thresholds.images == 12
    for unlooked in (None, iter([Path("missing.png")])):  # tests/cli/test_refusals.py has them all
        with pytest.raises(DataError, match="is above the review rate"):
            detector.calibrate(unlooked, reject_rate=0.3, review_rate=0.1)


def test_no_image_of_the_test_split_touches_a_threshold(run_folder: Path, product: Path) -> None:
    trained = anomaly.load(run_folder, device="cpu")
    with pytest.raises(DataError, match="test split"):
        trained.calibrate(product / "test" / "good", reject_rate=0.2, review_rate=0.2)
    evaluation = trained.evaluate()
    assert evaluation.metrics["image_auroc"] == 1.0
    assert repr(evaluation).splitlines()[-1].split()[:3] == ["disc", "3", "3"]
    for unlabelled in ("a_folder", Path("a_folder"), ["a.png"]):
        with pytest.raises(DataError, match="which are defective"):
            trained.evaluate(unlabelled)  # type: ignore[arg-type]
    assert trained.explain(product / "test" / "spot" / "000.png").missing == []


def test_a_program_that_predicts_files_ends_by_itself(
    detector: anomaly.Detector, tmp_path: Path
) -> None:
    detector.save(tmp_path / "model")
    write_part(tmp_path / "part.png", seed=1)
    code = (
        "import os, anomaly\n"
        f"detector = anomaly.load({str(tmp_path / 'model')!r}, device='cpu')\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "detector.predict('part.png')\n"
        f"os.chdir({str(tmp_path / 'model')!r})\n"
        "print(detector.predict('../part.png').verdict)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() in ("good", "review", "reject")
