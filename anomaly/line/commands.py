"""`anomaly serve` and `anomaly deploy`, with the versions that a run keeps."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from anomaly.cli.terminal import NOTE, ProgressLine, Stopping, agreed
from anomaly.desk.change import replacement
from anomaly.desk.golden import carry_missed
from anomaly.errors import AnomalyError, OutputError, visible, why
from anomaly.files.writing import draft_of, locked, locked_file
from anomaly.line.models import check
from anomaly.line.record import Record
from anomaly.line.sinks import Mqtt, Sink, Webhook
from anomaly.runtime import device_of
from anomaly.scoring.model import Model
from anomaly.storage.folder import (
    EXPORT,
    MANIFEST,
    check_run_folder,
    find_model,
    find_models,
    model_id,
)
from anomaly.storage.models import load_model
from anomaly.training.runs import training_record

_EARLIER, _WITHDRAWN = "earlier", "withdrawn"
# In the order in which they move: nobody finds a new model without its golden parts.
_BESIDE = ("train.json", "suspects", "golden")
_PARTS = (*_BESIDE, "model")

log = logging.getLogger(__name__)


def run_serve(options: argparse.Namespace) -> int:
    """Serve models until a signal comes; returns 0."""
    try:
        from anomaly.line.server import listening, serve
        from anomaly.line.service import InspectionService, make_app
    except ModuleNotFoundError as error:
        raise AnomalyError(
            f"serve needs {error.name}, which isn't installed: pip install 'anomaly[serve]'"
        ) from None
    if not 0 <= options.keep_good <= 1:
        raise AnomalyError(f"--keep-good is {options.keep_good}; it must be 0 to 1")
    if options.keep_pictures < 0:
        raise AnomalyError(f"--keep-pictures is {options.keep_pictures}; it must be 0 or more")
    token = _token(options)
    record, sinks = _record(options), _sinks(options)
    folders = served_names(find_models(options.models))
    with locked_file(record), Stopping(then="send parts without an answer again") as stop:
        # Exported models need no torch; each model's errors are logged once it is loaded.
        exported = any((folder / EXPORT).exists() for folder in folders.values())
        device = options.device if exported else device_of(options.device)
        listener = listening(options.host, options.port)
        recording = Record(record, options.keep_good, options.keep_pictures)
        with InspectionService(folders, recording, device=device, sinks=sinks) as service:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"serving {', '.join(folders)} at http://{shown}:{port}; Ctrl-C ends it")
            sent = "".join(f" and sent to {sink.shown}" for sink in sinks)
            print(f"every answer is written to {record}{sent}", flush=True)
            stop.at_work = True
            serve(make_app(service), service, listener, token, stop.has_come)
            stop.at_work = False
        log.info("stopped; all accepted parts are answered and recorded")
    return 0


def served_names(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Model folders by their names in routes, rows and pages, which are valid text."""
    # Backslashes are doubled, so that no name equals another one with escapes.
    return {visible(name.replace("\\", "\\\\")): folder for name, folder in folders.items()}


def _token(options: argparse.Namespace) -> str:
    """The token that clients have to send; empty for none, on a loopback host alone."""
    token, origin = os.environ.get("ANOMALY_TOKEN", "").strip(), "$ANOMALY_TOKEN"
    if (file := options.token_file) is not None:
        try:
            token, origin = file.read_text("utf-8-sig").strip(), file
        except (OSError, ValueError) as error:
            raise AnomalyError(f"--token-file {file} can't be read: {why(error)}") from None
    valid = len(token) >= 16 and token.isascii() and token.isprintable()
    if not valid and (token or file is not None):
        raise AnomalyError(
            f"the token in {origin} must have 16 characters or more, all plain ASCII: "
            "openssl rand -hex 16 makes one"
        )
    from anomaly.line.server import is_loopback  # with FastAPI, which is optional

    if not is_loopback(options.host):
        if not token:
            raise AnomalyError(
                f"--host {options.host} opens the service to other machines, which needs a token; "
                "give --token-file, or set $ANOMALY_TOKEN"
            )
        log.log(NOTE, "token and pictures are sent unencrypted; a proxy with TLS keeps them secret")
    return token


def _sinks(options: argparse.Namespace) -> list[Sink]:
    """Receivers of results; an address in the environment is hidden from lists of processes."""
    webhook = options.webhook or os.environ.get("ANOMALY_WEBHOOK", "").strip()
    mqtt = options.mqtt or os.environ.get("ANOMALY_MQTT", "").strip()
    sinks: list[Sink] = [Webhook(webhook)] if webhook else []
    return [*sinks, Mqtt(mqtt)] if mqtt else sinks


def _record(options: argparse.Namespace) -> Path:
    """The record's file, by default beside the models."""
    models: Path = options.models
    is_model = (models / MANIFEST).is_file()  # a model folder gets no file that isn't the model's
    return options.record or (models.parent if is_model else models) / "line.sqlite"


def run_deploy(options: argparse.Namespace) -> int:
    """Check and deploy the new version, or bring back the previous one.

    Returns:
        0 done; 1 refused and nothing changed, because known defects that the line's model catches
        would pass, or the model may be another product's.
    """
    if options.back == (options.model is not None):
        raise AnomalyError("give either --model, the new version, or --back")
    line = options.to / "model"
    folder = previous_version(options.to) / "model" if options.back else find_model(options.model)
    if same_model(line, folder):
        print(f"{options.to} holds this model already; nothing was changed")
        return 0
    model = load_model(folder)
    print(f"checked: {check(model, folder)}")
    replaces = (line / MANIFEST).is_file()
    if replaces and not agreed(_doubts(model, line), options):
        return 1
    if options.back:
        back(options.to)
    else:
        deploy(folder, options.to)
    print(f"{options.to} holds model {model.model_id} now")
    if replaces and not options.back:
        log.info(f"To undo: anomaly deploy --to {options.to} --back")
    return 0


def _doubts(model: Model, line: Path) -> list[str]:
    """Print what a new version changes; returns the reasons why a person has to agree to it.

    `line` is the model folder to be replaced.
    """
    try:
        before = load_model(line, model.device)
    except AnomalyError as error:
        return [f"nothing can be compared with the line's model: {error}"]
    with ProgressLine() as progress:
        change = replacement(before, model, progress)
    print("\n".join(change.lines()))
    name = training_record(line).get("name", model.name)
    if name != model.name:
        log.warning("the new version is named %s, the line's %s: the same part?", model.name, name)
    return list(change.doubts)


def deploy(new: Path, run: Path, kind: str = _EARLIER) -> None:
    """Copy a model into a run, which keeps its previous version.

    Golden parts and the facts of the training, above all the data set, are copied as well, and
    missed defects of the previous version are kept. The run is created if missing; its folder
    `kind` takes the previous version.

    Raises:
        OutputError: the run can't be written, or is a model folder or a folder of runs.
    """
    if (run / MANIFEST).is_file():
        raise OutputError(f"{run} is a model folder, which holds one version; give its run")
    check_run_folder(run)
    draft = draft_of(run / "model")
    beside = [new.parent / part for part in _BESIDE if new.name == "model"]
    with _changing(run):
        try:
            shutil.copytree(new, draft / "model")
            for part in filter(Path.exists, beside):
                copy = shutil.copytree if part.is_dir() else shutil.copy2
                copy(part, draft / part.name)
            carry_missed(run / "golden", draft / "golden", _id(draft))
            _move(run, _numbered(run, kind))
            _move(draft, run)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def previous_version(run: Path) -> Path:
    """The folder of the run's newest earlier version.

    Raises:
        OutputError: the run has no earlier version.
    """
    # A move that was broken off leaves a version without its model.
    versions = [v for v in _kept(run, _EARLIER) if (v / "model" / MANIFEST).is_file()]
    if not versions:
        raise OutputError(f"{run} has no earlier version (none in {run / _EARLIER})")
    return versions[-1]


def back(run: Path) -> None:
    """Bring a run's previous version back; the current one is kept as withdrawn.

    Raises:
        OutputError: the run has no earlier version, or can't be written.
    """
    with _changing(run):
        before = previous_version(run)
        deploy(before / "model", run, _WITHDRAWN)
        shutil.rmtree(before)


def _id(run: Path) -> str:
    model = run / "model"
    return model_id(model) if (model / MANIFEST).is_file() else ""


def same_model(old: Path, new: Path) -> bool:
    """True if two model folders hold the same model, exported to the same engine or not at all."""
    return _seals(old) == _seals(new)


def _seals(model: Path) -> list[bytes]:
    """Bytes of a model folder's manifest and of its export's facts; empty for a missing file."""
    files = (model / MANIFEST, model / EXPORT)
    return [file.read_bytes() if file.is_file() else b"" for file in files]


def _kept(run: Path, kind: str) -> list[Path]:
    """A run's versions of a kind, which names their folder; the oldest first."""
    return sorted(version for version in (run / kind).glob("*") if version.is_dir())


def _numbered(run: Path, kind: str) -> Path:
    """The path that is to keep the version in use, numbered after all others of its kind."""
    kept = _kept(run, kind)
    last = int(kept[-1].name.partition("-")[0]) if kept else 0
    return run / kind / f"{last + 1:03}-{_id(run)}"


def _move(source: Path, target: Path) -> None:
    """Move a version, without the other files of its run."""
    for part in _PARTS:
        if (source / part).exists():
            target.mkdir(parents=True, exist_ok=True)
            (source / part).rename(target / part)


@contextmanager
def _changing(run: Path) -> Iterator[None]:
    """Lock a run; errors of its files become `OutputError`."""
    with locked(run):
        try:
            yield
        except (OSError, ValueError) as error:
            raise OutputError(f"the versions in {run} can't be changed: {why(error)}") from None
