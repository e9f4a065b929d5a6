"""`anomaly station` and `anomaly camera`."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from anomaly.cli.common_options import device_and_threads
from anomaly.cli.stopping import Stopping
from anomaly.errors import AnomalyError, ConfigError, ModelError
from anomaly.files.outputs import locked_file
from anomaly.files.writing import write
from anomaly.imaging.read import Image, read_image
from anomaly.line.record import Keeping, Record, Recorder
from anomaly.line.sinks import CsvFile, Mqtt, Outbox, Webhook
from anomaly.scoring.image_statistics import measure
from anomaly.station.cameras import CameraThread, open_camera, present
from anomaly.station.settings import StationSettings, load_settings
from anomaly.storage.folder import find_model

if TYPE_CHECKING:
    from anomaly.station.station import Station

log = logging.getLogger(__name__)

_LOSSLESS = (".png", ".tif", ".tiff", ".bmp")
_NO_CAMERAS = (
    "no USB camera is connected, and no GenICam camera answers (these need libaravis-0.8-0)"
)
_NO_THRESHOLDS = "it has no thresholds, so no verdicts; set them with anomaly calibrate"


def _station(options: argparse.Namespace) -> int:
    """Inspect parts until a signal comes."""
    if importlib.util.find_spec("pymodbus") is None:
        raise AnomalyError(
            "station needs pymodbus, which isn't installed: pip install 'anomaly[station]'"
        )
    settings = load_settings(options.config)
    with Stopping() as stop, running(settings, options) as station:
        print(f"ready: every part is recorded in {settings.record}; stop with Ctrl-C", flush=True)
        while stop.signal is None and not station.closing.wait(0.1):
            pass
    counts = [f"{count} {state}" for state, count in station.parts.items()]
    log.info("stopped; parts: %s", ", ".join(counts) or "none")
    return int(station.failed)


@contextmanager
def running(settings: StationSettings, options: argparse.Namespace) -> Iterator[Station]:
    """A running station, which finishes its parts at the end of the `with` block.

    Args:
        settings: of the station.
        options: `device` and `threads`.
    """
    # pymodbus is optional: `_station` has checked that it is installed.
    from anomaly.line.registry import ModelRegistry
    from anomaly.station.station import Station, triggers

    models = {
        name: str(camera.model or settings.model) for name, camera in settings.cameras.items()
    }
    folders = {name: find_model(name) for name in models.values()}
    sinks = _sinks(settings)
    device, threads = device_and_threads(options, list(folders.values()))
    with locked_file(settings.record), ExitStack() as opened:
        record = Record(settings.record, Keeping(settings.keep_good, settings.keep_pictures))
        opened.callback(record.close)
        recorder = Recorder(record, lambda number, answer: None)
        registry = ModelRegistry(folders, recorder, device=device, workers=threads)
        slots = {camera: registry.models[name] for camera, name in models.items()}
        outboxes = [Outbox(record, sink, "triggers") for sink in sinks]
        station = Station(settings, record, slots, outboxes)
        work = triggers(station)
        station.check()
        opened.enter_context(recorder)
        opened.enter_context(registry)
        while any(slot.state == "loading" for slot in slots.values()):
            time.sleep(0.05)
        for slot in slots.values():
            if trouble := slot.unusable or (slot.now and not slot.now.marks and _NO_THRESHOLDS):
                raise ModelError(f"{slot.name}: {trouble}")
        for outbox in outboxes:
            opened.enter_context(outbox)
        opened.callback(station.close)
        station.start(work)
        yield station


def _sinks(settings: StationSettings) -> list[Any]:
    targets: tuple[tuple[Any, Any], ...] = (
        (Webhook, settings.webhook),
        (Mqtt, settings.mqtt),
        (CsvFile, settings.csv),
    )
    try:
        return [sink(target) for sink, target in targets if target is not None]
    except AnomalyError as error:
        raise ConfigError(str(error).removeprefix("--")) from None


def _camera(options: argparse.Namespace) -> int:
    """List cameras, or take a picture and print its exposure and sharpness."""
    output: Path | None = options.output
    if output is not None and output.suffix.lower() not in _LOSSLESS:
        raise AnomalyError(
            f"--output {output} must end in {', '.join(_LOSSLESS)}, which are lossless"
        )
    if options.source is None:
        lines = [f"{source}  {text}" for source, text in present().items()]
        print("\n".join(lines or [_NO_CAMERAS]))
        return 0
    data = CameraThread("", partial(open_camera, options.source)).first()[0]
    image = read_image(data)
    if output is not None:
        pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        write(output, cv2.imencode(output.suffix, pixels)[1].tobytes())
    print("\n".join(_figures(image)))
    if options.model is not None:
        print("\n".join(_compared(image, options)))
    return 0


def _figures(image: Image) -> list[str]:
    values = image.pixels.astype(np.float32) / np.float32(image.full_scale)
    clipped, black = float((values >= 1).any(2).mean()), float((values <= 0).all(2).mean())
    sharpness = measure(values, np.zeros(1), 0.0, 0).figures()["sharpness"]
    height, width = image.size
    return [
        f"{width} × {height}, {8 * image.pixels.itemsize} bits",
        f"exposure: {values.mean():.1%} of full scale on average, {clipped:.2%} of the pixels "
        f"clipped, {black:.2%} black",
        f"sharpness: {sharpness:.3g}; turn the lens until it is highest",
    ]


def _compared(image: Image, options: argparse.Namespace) -> list[str]:
    from anomaly.scoring.prediction import Prediction
    from anomaly.storage.load import load_model

    model = load_model(options.model, device_and_threads(options)[0])
    (result,) = model.score_all([image], workers=1)
    if not isinstance(result, Prediction):
        raise AnomalyError(f"the model can't score this picture: {result.reason}")
    seen = model.training_statistics.seen if model.training_statistics else {}
    lines = [
        f"{result.verdict or 'no verdict'}, score {result.score:.4g}; {result.reason}".strip("; ")
    ]
    for name, value in result.statistics.figures().items():
        low, high = seen.get(name, (np.nan, np.nan))
        lines.append(
            f"{name}: {value:.3g} as the model sees it, {low:.3g} to {high:.3g} in training"
        )
    return lines


COMMANDS = {"station": _station, "camera": _camera}
