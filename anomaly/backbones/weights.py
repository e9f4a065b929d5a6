"""Files of backbone weights: found on disk or downloaded, checked, and read.

Torch is imported only where a file is read, so that a wrong path is refused at once.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from safetensors import SafetensorError

from anomaly.errors import WeightsError, why
from anomaly.files.writing import at_home, draft_of, looked_in, sha256_of

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

# Tensors of a network by name.
State: TypeAlias = "dict[str, Tensor]"

# Seconds: the time in which a server has to answer, and the longest pause within a file.
_PATIENCE, _PAUSE = 10.0, 30.0


def weights_file(weights: str) -> Path | None:
    """The file that `backbone.weights` names, its `~` replaced; None for `imagenet` and `random`.

    Raises:
        WeightsError: there is no such file, or its suffix isn't that of a weights file.
        AnomalyError: there is no home folder for its `~`.
    """
    if weights in ("imagenet", "random"):
        return None
    file = at_home(Path(weights))
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else f"doesn't exist{looked_in(file)}"
        raise WeightsError(
            f"backbone.weights: {file} {kind}. Give `imagenet`, `random`, "
            "or the path of a .safetensors or .pth file"
        )
    if file.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise WeightsError(
            f"backbone.weights: {file} isn't a .safetensors, .pth, .pt or .bin file; convert it "
            "first"
        )
    return file


def search_folders() -> list[Path]:
    """Folders that are searched for official files, in this order.

    `$ANOMALY_WEIGHTS`, `weights/` in the working directory, and torch's own cache of downloads.
    """
    named = os.environ.get("ANOMALY_WEIGHTS")
    return [*([at_home(Path(named))] if named else []), Path("weights"), _download_folder()]


def _download_folder() -> Path:
    """Torch's own folder of downloads; `weights/` where the user has no home folder."""
    import torch

    folder = torch.hub.get_dir()  # begins with "~" where there is no home folder
    return Path("weights") if folder.startswith("~") else Path(folder, "checkpoints")


def official_state(url: str) -> tuple[State, str]:
    """The tensors in an official torchvision file by name, and its sha256, which is checked.

    Args:
        url: the file's official address; its name carries the first digits of its sha256.

    Raises:
        WeightsError: the file is damaged, isn't the official one, or can't be downloaded.
    """
    file, prefix = official_file(url), _hash_in(url)
    state, sha256 = read_state(file)
    if not sha256.startswith(prefix):
        raise WeightsError(
            f"{file} isn't the official file: its sha256 starts with {sha256[: len(prefix)]} "
            f"instead of {prefix}. Replace it with the official {file.name}. To use this file on "
            "purpose, rename it and give its path as backbone.weights"
        )
    return state, sha256


def file_on_disk(url: str) -> Path | None:
    """An official torchvision file, by its address, in a search folder; None if in none."""
    files = (folder / url.rpartition("/")[2] for folder in search_folders())
    return next(filter(Path.is_file, files), None)


def official_file(url: str) -> Path:
    """An official torchvision file, by its address; downloaded if it isn't on disk.

    Raises:
        WeightsError: it isn't on disk and can't be downloaded.
    """
    return file_on_disk(url) or _download(url)


def _hash_in(url: str) -> str:
    """The first digits of an official file's sha256, which its name ends with."""
    return url.removesuffix(".pth").rpartition("-")[2]


def _download(url: str) -> Path:
    """Download an official file into torch's folder; its path, or WeightsError."""
    # Not `torch.hub.load_state_dict_from_url`: it waits for a silent server for ever.
    name, prefix = url.rpartition("/")[2], _hash_in(url)
    target = _download_folder() / name
    draft = draft_of(target)  # a download that breaks off leaves no file under the name itself
    try:
        with _opened(url) as answer:
            log.info(f"downloading the weights {name} from {urlsplit(url).netloc} (only once)")
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("xb") as file:
                shutil.copyfileobj(answer, file)
        if sha256_of(draft).startswith(prefix):
            return draft.replace(target)
        reason = f"the file sent has a wrong hash, its sha256 should start with {prefix}; try again"
    except urllib.error.HTTPError as error:
        reason = f"it answered {error.code} {error.reason}"
    except (OSError, HTTPException) as error:  # the network's error, or the disk's
        inner = getattr(error, "reason", error)  # urllib wraps the network's own error
        reason = why(inner) if isinstance(inner, OSError) else "no answer"
    finally:
        draft.unlink(missing_ok=True)
    folders = ", ".join(dict.fromkeys(str(f.absolute()) for f in search_folders()))
    raise WeightsError(
        f"the weights {name} are missing and can't be downloaded from {url} ({reason}). Put the "
        f"official file {name} into one of: {folders} (or set ANOMALY_WEIGHTS)"
    )


def _opened(url: str) -> Any:
    """A server's answer to a request, within `_PATIENCE` seconds.

    An unreachable name server, or an address behind a firewall, takes a minute to fail. So a thread
    asks, which is left to itself after that time.

    Raises:
        OSError: the server can't be reached, refuses, or (TimeoutError) doesn't answer in time.
    """
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=_PAUSE))
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    try:
        return answer.result(_PATIENCE)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {_PATIENCE:g} s") from None


def read_state(file: Path) -> tuple[State, str]:
    """The tensors in a `.safetensors` or `.pth` file by name, and its sha256.

    Raises:
        WeightsError: the file can't be read, is damaged, or holds more or other than tensors.
    """
    log.debug("weights from %s", file.absolute())
    try:
        sha256 = sha256_of(file)
    except OSError as error:
        raise WeightsError(f"{file} can't be read: {why(error)}") from None
    damaged = WeightsError(
        f"{file} is cut short or damaged ({file.stat().st_size:,} bytes); download or copy it again"
    )
    try:
        loaded = _loaded(file)
    except SafetensorError:
        raise damaged from None
    except Exception as error:
        # torch.load raises half a dozen types, depending on where the file breaks off.
        if "weights_only" in str(error) and zipfile.is_zipfile(file):
            raise WeightsError(
                f"{file} holds more than tensors (a whole pickled model?), which could run code; "
                "save its state_dict() and give that"
            ) from None
        raise damaged from None
    return _tensors_of(loaded, file), sha256


def _loaded(file: Path) -> Any:
    import torch
    from safetensors.torch import load_file

    with file.open("rb") as stream:
        # The content decides, since names may be wrong: a safetensors file begins with 8 bytes, its
        # header's length, and then the header in JSON.
        if stream.read(9)[8:] == b"{":
            return load_file(file)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)


def _tensors_of(loaded: Any, file: Path) -> State:
    """The tensors by name in a weights file's content, also below `state_dict`; else refused."""
    from torch import Tensor

    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise WeightsError(f"{file} holds no state_dict (tensors by name); save model.state_dict()")
    return {str(name): tensor for name, tensor in loaded.items()}
