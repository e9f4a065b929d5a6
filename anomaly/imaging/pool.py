"""The program's decoding processes: they read images and write their pictures.

Every image file goes through here, whatever the command. A damaged file can take a decoder down,
and with it its process: then the file is tried once more in a new one, and after that it is
`failed`. So it is, at once, when it takes too long; the program goes on. The processes import no
torch (45 MB each, not 700), and are asked in pickled messages through their standard input.

There are as many as the program has threads. Each starts when it is first needed and ends with the
program.

Nobody knows what a parser does with a damaged file. So a process limits itself: the kernel refuses
it memory beyond the limit, and ends it when a request's computing time is over. Only computing
counts, so that neither a slow network folder nor a busy machine ends it.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import AnomalyError, ImageError, OutputError, why
from anomaly.imaging import read
from anomaly.imaging.loading import (
    NetworkInput,
    Preprocessing,
    UnusableImage,
    load,
    paint,
    to_unusable,
)
from anomaly.imaging.read import Image, described
from anomaly.runtime import StoppedError, prefetch, program_threads

AHEAD = 4  # images that each process may be ahead of the network
# On the clock, for a file that doesn't come; the largest image that is usually accepted takes 40 s
# of a quiet machine.
CLOCK_SECONDS = 300.0
_ATTEMPTS = 2  # processes that a file may take down before it is `failed`
_MEGABYTES = 1000  # that a process may take
_LEAST_MEGABYTES = 200  # an interpreter with its libraries takes 70
_KEPT_BYTES = 256 * 1024**2  # decoded images that each process keeps to draw them
_HOME = str(Path(__file__).resolve().parents[2])  # the folder that holds the package
_PIPE_BYTES = 1 << 20  # an image of the network's size in one go; 64 kB take 3 ms more for each

Item = TypeVar("Item")


@dataclass(frozen=True)
class Task:
    """A task of `Decoders` on its way to the processes; its number tells its images apart."""

    loading: Preprocessing
    pictures: Any
    keep_image: bool
    looks: bool
    number: int = field(default_factory=itertools.count().__next__)


class Decoders:
    """The program's decoding processes, at one task.

    Args:
        loading: the way from files to network inputs.
        pictures: its method `write` draws an image that was decoded; it travels to the processes,
            pickled. None for nothing.
        keep_image: True hands over the decoded image with the network's input.
        looks: True adds the image's `Look` to each network input.
    """

    def __init__(
        self,
        loading: Preprocessing,
        pictures: Any = None,
        *,
        keep_image: bool = False,
        looks: bool = False,
    ) -> None:
        self._task = Task(loading, pictures, keep_image, looks)
        self._of: dict[int, _DecoderProcess] = {}

    def load_all(
        self,
        items: Iterable[tuple[int, Path | Image | UnusableImage]],
        stopped: Callable[[], bool] | None = None,
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Load images in order, a bounded number ahead of the one asked for.

        Args:
            items: index of each image, and its file, or its pixels, or why it can't be used.
            stopped: asked now and then whether they are still wanted.

        Raises:
            StoppedError: they aren't; a process that is at one of them is ended.
        """
        processes = _processes()
        # An image that is worth tiling is too large to have many of it waiting.
        ahead = 0 if self._task.loading.sizing.tile else AHEAD * len(processes)
        try:
            yield from prefetch(lambda item: self.submit(*item), items, ahead, stopped)
        except StoppedError:
            for process in processes:
                process.drop()
            raise

    def load(self, source: Path | Image, index: int = 0) -> NetworkInput | UnusableImage:
        """Load one image."""
        return self.submit(index, source).result()

    def submit(
        self, index: int, source: Path | bytes | Image | UnusableImage
    ) -> Future[NetworkInput | UnusableImage]:
        """Load one image among many, as `load_all` does; nobody bounds how many wait.

        Args:
            index: no other image that is being loaded or waits for its pictures has it.
            source: its file, the file's bytes, pixels, or why it can't be used.
        """
        task, process = self._task, _idlest()
        if task.pictures is not None:
            self._of[index] = process
        if isinstance(source, Path | bytes):
            return process.submit(_of_image, process, task, "load", index, source)
        done: Future[NetworkInput | UnusableImage] = Future()
        if isinstance(source, Image):
            done.set_result(load(index, source, task.loading, looks=task.looks))
        else:
            done.set_result(source)
        return done

    def finish(self, index: int, path: Path | bytes, *what: Any) -> Future[Any]:
        """Write the pictures of an image that was loaded and that is now scored.

        Args:
            index: the number by which the image was loaded.
            path: the image's file; that file's bytes where it was loaded from them.
            what: arguments of `pictures.write` behind the image.

        Returns:
            What that returns, once the pictures are on disk; `UnusableImage` when the file can't be
            read any more, can't be drawn, or takes its process down. The future raises OutputError
            when they can't be written.
        """
        process = self._of.pop(index)
        return process.submit(_of_image, process, self._task, "finish", index, path, *what)

    def forget(self, index: int) -> None:
        """Forget an image that was loaded and needs no pictures."""
        self._of.pop(index, None)


def read_all(function: Callable[[Item], Any], items: Iterable[Item]) -> Iterator[Any]:
    """Results of a function that reads files, in order, a bounded number ahead.

    Args:
        function: a module's function of one item; items, results and errors can be pickled.
        items: the arguments, one for each call.

    Yields:
        The results; an ImageError (`failed`) where an item took too long, or took its process
        down.

    Raises:
        Exception: what the function raises.
    """
    ahead = AHEAD * len(_processes())
    return prefetch(lambda item: _called(function, item), items, ahead)


def read_one(function: Callable[..., Any], *arguments: Any, about: Path) -> Any:
    """Result of a function that reads a file, called in a decoding process.

    Args:
        function: a module's function; arguments, result and errors can be pickled.
        arguments: its arguments.
        about: the file, for messages.

    Raises:
        ImageError: `failed`: it took too long, or took its process down.
    """
    result = _called(function, *arguments).result()
    if isinstance(result, ImageError):
        raise ImageError(f"{about}: {result}", result.status)
    return result


def warm_up(images: int) -> None:
    """Start the processes that so many images need, while this one has something else to do."""
    for process in _processes()[:images]:
        process.submit(process.start)


def rest() -> None:
    """End the processes when they are done, for their memory; whoever asks more starts them."""
    for process in _pools.get(os.getpid(), ()):
        process.submit(process.stop)


@atexit.register
def close() -> None:
    """End the processes, whatever they are at; whoever asks more starts others."""
    for process in _pools.pop(os.getpid(), ()):
        process.close()


# Decoding processes by the program's process number: a fork has none of the threads that ask its
# parent's, and neither asks nor ends those.
_pools: dict[int, list[_DecoderProcess]] = {}


def _processes() -> list[_DecoderProcess]:
    program = os.getpid()
    if program not in _pools:
        _pools.setdefault(program, [_DecoderProcess() for _ in range(program_threads())])
    return _pools[program]


def _idlest() -> _DecoderProcess:
    return min(_processes(), key=lambda process: len(process.waiting))


def _called(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    process = _idlest()
    return process.submit(process.ask, "reading", None, "call", function, *arguments)


def _of_image(
    process: _DecoderProcess, task: Task, name: str, index: int, source: Path | bytes, *what: Any
) -> Any:
    """Result of a process that is to `load` or to `finish` an image; its refusal if it failed."""
    doing = "decoding" if name == "load" else "drawing"
    answer = process.ask(doing, task, name, index, source, *what)
    if isinstance(answer, ImageError):
        return UnusableImage(index, answer.status, f"{described(index, source)}: {answer}")
    if isinstance(answer, NetworkInput) and answer.image is not None:
        # Of an image that isn't to be kept, the tiles are all that the pixels are needed for.
        render = partial(paint, answer.name, answer.image)
        return replace(answer, render=render, image=answer.image if task.keep_image else None)
    return answer


class _DecoderProcess:
    """One process as the program sees it, asked one thing at a time by a thread."""

    def __init__(self) -> None:
        self.waiting: set[Future[Any]] = set()  # jobs that aren't done
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._sent: Task | None = None  # the task that the child knows
        self._reading = False  # True while it reads a file, for which its time is limited
        self._over = ""  # reason for which its last job was ended
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "decoder")

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Do something in the process's thread once everything before it is done."""
        future = self._thread.submit(job, *arguments)
        self.waiting.add(future)
        future.add_done_callback(self.waiting.discard)
        return future

    def ask(self, doing: str, task: Task | None, name: str, *arguments: Any) -> Any:
        """The process's answer to a request; called in its thread.

        Args:
            doing: `reading`, `decoding` or `drawing` a file, for messages.
            task: the task that the request belongs to; None where it needs none.
            name: a method of `Worker`.
            arguments: that method's arguments.

        Returns:
            What the method returns; an ImageError (`failed`) where it took too long, or the process
            has died of it, twice.

        Raises:
            AnomalyError: no such process can be started on this machine.
            Exception: what the method raised, if that is nothing of the image's own.
        """
        over = f"has crashed {_ATTEMPTS} decoding processes, one after the other"
        for _ in range(_ATTEMPTS):
            child = self.start()
            if child is None:
                over = "wasn't waited for"
                break
            try:
                done, answer = self._exchange(child, task, name, arguments)
            except (OSError, EOFError, pickle.UnpicklingError):
                code = self.stop(patience=1)
                if code == -signal.SIGPROF:
                    self._over = (
                        f"took more than {read.COMPUTING_SECONDS:.0f} s of computing, the limit "
                        f"for {read.MODEST_PIXELS / 1e6:.0f} million pixels"
                    )
                if self._over:
                    over = self._over
                    break
                continue
            if not done:
                raise answer
            return answer
        return ImageError(f"{doing} it {over}", "failed")

    def _exchange(
        self, child: subprocess.Popen[bytes], task: Task | None, name: str, arguments: Any
    ) -> tuple[bool, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        self._reading, self._over = name != "finish", ""
        try:
            send(child.stdin, (_folder(), None if task is self._sent else task, name, arguments))
            self._sent = task or self._sent
            if self._reading and not wait([child.stdout.fileno()], CLOCK_SECONDS):
                self.drop(f"took more than {CLOCK_SECONDS:.0f} s, the limit for a file")
            done, answer = pickle.load(child.stdout)
        finally:
            self._reading = False
        return done, answer

    def drop(self, over: str = "wasn't waited for") -> None:
        """End it if it is reading a file, which may remain unfinished."""
        with self._lock:
            if self._reading and self._child is not None:
                self._over = over
                self._child.kill()

    def close(self) -> None:
        """End it, whatever it is at."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        self._thread.shutdown(cancel_futures=True)
        self.stop()

    def start(self) -> subprocess.Popen[bytes] | None:
        """Start it, unless it is there; None once it was closed."""
        with self._lock:
            if self._child is None and not self._closed:
                self._child, self._sent = start(), None
            return None if self._closed else self._child

    def stop(self, patience: float = 0) -> int:
        """End it, if it is there, and return its exit code.

        Args:
            patience: seconds in which it may end by itself, so that its exit code tells why.

        Raises:
            AnomalyError: it has ended before it could be asked anything.
        """
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience)
        child.kill()
        code = child.wait()
        errors = child.stderr.read().decode(errors="replace").strip() if child.stderr else ""
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                with suppress(OSError):  # what it couldn't be sent any more
                    stream.close()
        if code == 1 and errors:
            raise AnomalyError(
                "the processes that decode images end as soon as they are started: "
                f"{errors.splitlines()[-1]}"
            )
        return code


def _folder() -> Path | None:
    """The working folder, in which a process looks for files; None where it was deleted."""
    with suppress(OSError):
        return Path.cwd()
    return None


def start() -> subprocess.Popen[bytes]:
    """A fresh interpreter that serves: works alike on every system, whatever threads there are.

    Raises:
        AnomalyError: none can be started.
    """
    code = f"{_imports()}; serve({_memory_limit()})"
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # until it serves
            env=os.environ | threads,
        )
    except OSError as error:
        raise AnomalyError(
            f"no process can be started that decodes images: {why(error)}; end other programs, or "
            "give the machine more memory"
        ) from None
    if sys.platform == "linux" and child.stdout is not None:
        with suppress(OSError):  # the user's pipes hold as much as they may
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return child


def _imports() -> str:
    """A program that finds the modules where this one does, its working folder changed or not."""
    places = [*sys.path, _HOME]
    return f"import sys; sys.path[:] = {places!r}; from {serve.__module__} import serve"


def _memory_limit() -> int:
    """Bytes that a decoding process may take: 1 GB, or as many megabytes as the environment says.

    Raises:
        AnomalyError: `ANOMALY_DECODER_MEMORY` isn't a number of megabytes.
    """
    text = os.environ.get(read.MEMORY_SETTING, str(_MEGABYTES))
    if not text.isdecimal() or int(text) < _LEAST_MEGABYTES:
        raise AnomalyError(
            f"{read.MEMORY_SETTING} is {text!r}; it must be a whole number of megabytes, "
            f"{_LEAST_MEGABYTES} or more"
        )
    return int(text) * 1_000_000


def send(stream: IO[bytes], message: object) -> None:
    """Hand a message to the other end of a pipe."""
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def serve(memory: int) -> None:
    """The work of a decoding process, until its standard input ends, as it does with its parent.

    Args:
        memory: bytes that it may take.
    """
    cv2.setNumThreads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when it is over
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    # Whatever a library may print mustn't get between the answers.
    answers, nowhere = os.fdopen(os.dup(1), "wb"), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    worker = Worker()
    # Not RLIMIT_AS, which counts the libraries' files, too, and room that is only reserved.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or memory < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    with suppress(BrokenPipeError, EOFError):
        while True:
            folder, *request = pickle.load(sys.stdin.buffer)  # from our own parent
            if folder is not None:
                os.chdir(folder)
            # After so much computing the kernel ends this process; large images get more time, see
            # `read.read_image`.
            signal.setitimer(signal.ITIMER_PROF, read.COMPUTING_SECONDS)
            # Nothing here holds the answer, or an error and all that its frames hold, any longer.
            send(answers, worker.answer(*request))
            del request


class Worker:
    """Work of a process: to `call`, to `load` or to `finish`.

    It keeps the images that it has decoded, within `_KEPT_BYTES`, where they are to be drawn; those
    that didn't fit it reads again.
    """

    def __init__(self) -> None:
        self._task: Task
        self._kept: OrderedDict[tuple[int, int], Image] = OrderedDict()

    def answer(self, task: Task | None, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """(True, result) of a request that was done, else (False, its error).

        Args:
            task: the task from now on; None for the last one.
            name: the method that does it: `call`, `load` or `finish`.
            arguments: that method's arguments.
        """
        if task is not None:
            self._task = task
        try:
            result = getattr(self, name)(*arguments)
            if isinstance(result, UnusableImage) and result.status == "unsupported" and self._kept:
                self._kept.clear()  # they may take the memory that this one needs
                result = getattr(self, name)(*arguments)
            return True, result
        except Exception as error:  # of no image alone: a full disk, a mistake of ours
            return False, error

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a function that needs none of the images that are kept."""
        return function(*arguments)

    def load(self, index: int, source: Path | bytes) -> NetworkInput | UnusableImage:
        """Load an image; it is kept to be drawn, and handed over to be cut into tiles."""
        loaded = load(index, source, self._task.loading, looks=self._task.looks)
        if isinstance(loaded, UnusableImage):
            return loaded
        if self._task.pictures is not None:
            self._kept[self._task.number, index] = loaded.decoded
            held = sum(kept.pixels.nbytes for kept in self._kept.values())
            while held > _KEPT_BYTES and len(self._kept) > 1:
                held -= self._kept.popitem(last=False)[1].pixels.nbytes
        handed = self._task.keep_image or not loaded.view.whole
        return replace(loaded, image=loaded.image if handed else None, render=_elsewhere)

    def finish(self, index: int, source: Path | bytes, *what: Any) -> Any:
        """Draw an image, which is forgotten then."""
        try:
            image = self._kept.pop((self._task.number, index), None)
            if image is None:
                image = read.read_image(source, self._task.loading.decoding)
            signal.setitimer(signal.ITIMER_PROF, 0)  # drawing follows no file's orders
            return self._task.pictures.write(image, *what)
        except OutputError:  # of every image to come, too
            raise
        except Exception as error:
            return to_unusable(index, described(index, source), error)


def _elsewhere(view: Any) -> NDArray[np.float32]:
    raise ValueError(f"{view} can't be rendered: the image was decoded in another process")
