"""Decoding processes of the program: they read image files and write their pictures.

Every image file goes through here, whatever the command. A damaged file can crash a decoder, and
with it its process: then a new process tries the file once more, and after that the file is
`failed`. A file that takes too long is `failed` at once. The program goes on. The processes import
no torch (45 MB each, not 700), and are asked in pickled messages through their standard input.

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, TypeVar

import cv2

from anomaly.errors import AnomalyError, ImageError, OutputError, why
from anomaly.imaging import read
from anomaly.imaging.loading import (
    NetworkInput,
    Preprocessing,
    UnusableImage,
    load,
    to_unusable,
)
from anomaly.imaging.read import Image, described
from anomaly.runtime import StoppedError, prefetch, program_threads

AHEAD = 4  # images that each process may be ahead of the network
# Limit of waiting time for a file that doesn't come; the largest image that is usually accepted
# takes 40 s of a quiet machine.
CLOCK_SECONDS = 300.0
_ATTEMPTS = 2  # processes that a file may crash before it is `failed`
_MEGABYTES = 1000  # memory limit of a process, unless the environment sets another
_LEAST_MEGABYTES = 200  # least memory limit; an interpreter with its libraries takes 70 MB
_KEPT_BYTES = 256 * 1024**2  # decoded images that each process keeps to draw them
_HOME = str(Path(__file__).resolve().parents[2])  # the folder that holds the package
_PIPE_BYTES = 1 << 20  # holds an image of the network's size; 64 kB take 3 ms more for each

# Verbs for messages, by the method of `Worker` that a request names.
_DOING = {"call": "reading", "load": "decoding", "finish": "drawing"}
_ABANDONED = "was stopped, as the program ends"

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Decoders:
    """A task of the decoding processes: load images, and draw the pictures of loaded ones.

    Attributes:
        loading: preprocessing from files to network inputs.
        pictures: object whose method `write` draws a decoded image; it travels to the processes,
            pickled. None if nothing is drawn.
        keep_image: hand the decoded image over to the prediction.
        looks: add the image's `Look` to each network input.
        number: number of the task, which tells its images from those of other tasks.
    """

    loading: Preprocessing
    pictures: Any = None
    _: KW_ONLY
    keep_image: bool = False
    looks: bool = False
    number: int = field(default_factory=itertools.count().__next__, init=False)
    # Processes that have loaded the images still to be drawn, by image index.
    _loaders: dict[int, _DecoderProcess] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaders": {}}  # a process's threads and pipes stay here

    def load_all(
        self,
        items: Iterable[tuple[int, Path | Image | UnusableImage]],
        stopped: Callable[[], bool] | None = None,
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Load images in order, a bounded number ahead of the image asked for.

        Args:
            items: index of each image, and its file, its pixels, or its refusal.
            stopped: asked now and then; returns True once the images aren't wanted any more.

        Raises:
            StoppedError: `stopped` has returned True; processes that read a file are ended.
        """
        processes = _processes()
        # An image that is worth tiling is too large to have many of it waiting.
        ahead = 0 if self.loading.sizing.tile else AHEAD * len(processes)
        try:
            yield from prefetch(lambda item: self.submit(*item), items, ahead, stopped)
        except StoppedError:
            for process in processes:
                process.drop()
            raise

    def load(self, source: Path | Image, index: int = 0) -> NetworkInput | UnusableImage:
        """Load one image, a file or pixels, and wait for it."""
        return self.submit(index, source).result()

    def submit(
        self, index: int, source: Path | bytes | Image | UnusableImage
    ) -> Future[NetworkInput | UnusableImage]:
        """Future result of loading one image among many; nothing bounds how many wait.

        Args:
            index: number of the image; no other image that is being loaded or waits for its
                pictures has it.
            source: the file, its bytes, pixels, or the refusal of an unusable image.
        """
        process = _idlest()
        if self.pictures is not None:
            self._loaders[index] = process
        if isinstance(source, UnusableImage):
            return process.submit(lambda: source)
        if isinstance(source, Image):  # no parser is needed, so this program renders it
            return process.submit(load, index, source, self.loading, looks=self.looks)
        return process.submit(self._answer, process, "load", index, source)

    def finish(self, index: int, path: Path | bytes, *arguments: Any) -> Future[Any]:
        """Write the pictures of a loaded image, in the process that has loaded it.

        Args:
            index: number under which the image was loaded.
            path: the image's file, or the file's bytes, as given for loading.
            arguments: arguments of `pictures.write` behind the image.

        Returns:
            Future result of `pictures.write`, once the pictures are on disk; `UnusableImage` if the
            file can't be read any more, can't be drawn, or crashes its process. The future raises
            OutputError if the pictures can't be written.
        """
        process = self._loaders.pop(index)
        return process.submit(self._answer, process, "finish", index, path, *arguments)

    def _answer(
        self, process: _DecoderProcess, name: str, index: int, source: Path | bytes, *arguments: Any
    ) -> Any:
        """Answer of a process that loads or finishes an image; `UnusableImage` if that fails."""
        answer = process.ask(self, name, index, source, *arguments)
        if isinstance(answer, ImageError):
            return UnusableImage(index, answer.status, f"{described(index, source)}: {answer}")
        if isinstance(answer, NetworkInput):
            return replace(answer, keep_image=self.keep_image)
        return answer

    def forget(self, index: int) -> None:
        """Forget a loaded image that needs no pictures."""
        self._loaders.pop(index, None)


def read_all(function: Callable[[Item], Any], items: Iterable[Item]) -> Iterator[Any]:
    """Results of a function that reads files, in order, a bounded number ahead.

    Args:
        function: a module's function of one item; items, results and errors can be pickled.
        items: the arguments, one for each call.

    Yields:
        The results; an ImageError (`failed`) where an item took too long or crashed its process.

    Raises:
        Exception: an error of the function.
    """
    return prefetch(lambda item: _called(function, item), items, AHEAD * len(_processes()))


def read_one(function: Callable[..., Any], *arguments: Any, about: Path) -> Any:
    """Result of a function that reads a file, called in a decoding process.

    Args:
        function: a module's function; arguments, result and errors can be pickled.
        arguments: the function's.
        about: the file, for messages.

    Raises:
        ImageError: `failed`: the call took too long or crashed its process.
    """
    result = _called(function, *arguments).result()
    if isinstance(result, ImageError):
        raise ImageError(f"{about}: {result}", result.status)
    return result


def warm_up(images: int) -> None:
    """Start the processes that so many images need, while this process has other work."""
    for process in _processes()[:images]:
        process.submit(process.started)


def rest() -> None:
    """End the processes once they are done, to free memory; the next request starts others."""
    for process in _pools.get(os.getpid(), ()):
        process.submit(process.stop)


@atexit.register
def close() -> None:
    """End the processes in the middle of their work; the next request starts others."""
    for process in _pools.pop(os.getpid(), ()):
        process.close()


# Decoding processes by process id of the program: a fork lacks the threads that ask its parent's
# processes, so it starts processes of its own, and never ends its parent's.
_pools: dict[int, list[_DecoderProcess]] = {}


def _processes() -> list[_DecoderProcess]:
    """The program's decoding processes; each starts with its first request."""
    program = os.getpid()
    if program not in _pools:
        _pools.setdefault(program, [_DecoderProcess() for _ in range(program_threads())])
    return _pools[program]


def _idlest() -> _DecoderProcess:
    return min(_processes(), key=lambda process: len(process.waiting))


def _called(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Future result of a function, called by the idlest process."""
    process = _idlest()
    return process.submit(process.ask, None, "call", function, *arguments)


class _DecoderProcess:
    """A decoding process as the program sees it; a thread sends it one request after another."""

    def __init__(self) -> None:
        self.waiting: set[Future[Any]] = set()  # jobs that aren't done
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._sent: Decoders | None = None  # the task that the child has received
        self._reading = False  # True while it reads a file, for which its time is limited
        self._over = ""  # reason for which its last request was broken off
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "decoder")

    def submit(self, job: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        """Call a function in the process's thread, behind all earlier jobs."""
        future = self._thread.submit(job, *arguments, **options)
        self.waiting.add(future)
        future.add_done_callback(self.waiting.discard)
        return future

    def ask(self, task: Decoders | None, name: str, *arguments: Any) -> Any:
        """Answer of the process to a request; called in the process's thread.

        Args:
            task: the task that the request belongs to; None for `call`, which needs none.
            name: a method of `Worker`.
            arguments: arguments of that method.

        Returns:
            The method's result; an ImageError (`failed`) where it took too long, or has crashed
            the process twice.

        Raises:
            AnomalyError: no such process can be started on this machine.
            Exception: an error of the method that isn't the image's fault.
        """
        for _ in range(_ATTEMPTS):
            if (child := self.started()) is None:
                self._over = _ABANDONED
                break
            try:
                done, answer = self._exchange(child, task, name, arguments)
            except (OSError, EOFError, pickle.UnpicklingError):
                if self.stop(patience=1) == -signal.SIGPROF:
                    self._over = (
                        f"took more than {read.COMPUTING_SECONDS:.0f} s of computing, the limit "
                        f"for {read.MODEST_PIXELS / 1e6:.0f} million pixels"
                    )
                if self._over:  # only a crash is tried again
                    break
            else:
                if not done:
                    raise answer
                return answer
        reason = self._over or f"has crashed {_ATTEMPTS} decoding processes, one after the other"
        return ImageError(f"{_DOING[name]} it {reason}", "failed")

    def _exchange(
        self, child: subprocess.Popen[bytes], task: Decoders | None, name: str, arguments: Any
    ) -> tuple[bool, Any]:
        """Send a request, and receive (True, result) or (False, error).

        Raises:
            OSError, EOFError, UnpicklingError: the process ended before it had answered.
        """
        # It was started with pipes.
        assert child.stdin is not None
        assert child.stdout is not None
        self._reading = name != "finish"
        self._over = ""
        try:
            send(child.stdin, (_folder(), None if task is self._sent else task, name, arguments))
            self._sent = task or self._sent
            if self._reading and not wait([child.stdout.fileno()], CLOCK_SECONDS):
                self.drop(f"took more than {CLOCK_SECONDS:.0f} s, the limit for a file")
            done, answer = pickle.load(child.stdout)
        finally:
            self._reading = False
        return done, answer

    def drop(self, over: str = _ABANDONED) -> None:
        """End the process if it is reading a file; `over` is the reason, for the file's message."""
        with self._lock:
            if self._reading and self._child is not None:
                self._over = over
                self._child.kill()

    def close(self) -> None:
        """End the process for good, in the middle of its work."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        self._thread.shutdown(cancel_futures=True)
        self.stop()

    def started(self) -> subprocess.Popen[bytes] | None:
        """The running process, started if there is none; None once this was closed."""
        with self._lock:
            if self._child is None and not self._closed:
                self._child, self._sent = start(), None
            return None if self._closed else self._child

    def stop(self, patience: float = 0) -> int:
        """End the process, and return its exit code; 0 if there is none.

        Args:
            patience: seconds in which it may end by itself, so that its exit code tells why.

        Raises:
            AnomalyError: it had failed to start.
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
        for stream in filter(None, (child.stdin, child.stdout, child.stderr)):
            with suppress(OSError):  # a request that wasn't sent whole
                stream.close()
        if code == 1 and errors:
            raise AnomalyError(
                "the processes that decode images end as soon as they are started: "
                f"{errors.splitlines()[-1]}"
            )
        return code


def _folder() -> Path | None:
    """The program's working folder, where relative paths start; None if it was deleted."""
    with suppress(OSError):
        return Path.cwd()
    return None


def start() -> subprocess.Popen[bytes]:
    """A decoding process: a fresh interpreter, as a fork would lack the program's threads.

    Raises:
        AnomalyError: no process can be started.
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
    """Source text that imports `serve` from where this program has it, in any working folder."""
    return f"import sys; sys.path[:] = {[*sys.path, _HOME]}; from {serve.__module__} import serve"


def _memory_limit() -> int:
    """Bytes of memory that a decoding process may take: 1 GB, or the environment's megabytes.

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
    """Send a message through a pipe, pickled."""
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def serve(memory: int) -> None:
    """Answer requests in a decoding process until its standard input ends, as its parent does.

    Args:
        memory: bytes of memory that the process may take.
    """
    cv2.setNumThreads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent ends its processes itself
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process at its time limit
    # A library's prints mustn't get between the answers.
    answers, nowhere = os.fdopen(os.dup(1), "wb"), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    worker = Worker()
    # RLIMIT_AS would also count the libraries' files, and memory that is only reserved.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or memory < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    with suppress(BrokenPipeError, EOFError):
        while True:
            folder, *request = pickle.load(sys.stdin.buffer)  # safe: the parent is this program
            if folder is not None:
                os.chdir(folder)
            # After so much computing the kernel ends this process; `read.read_image` grants large
            # images more.
            signal.setitimer(signal.ITIMER_PROF, read.COMPUTING_SECONDS)
            send(answers, worker.answer(*request))
            del request  # frees its memory while this process waits


class Worker:
    """Work of a decoding process: its methods `call`, `load` and `finish`.

    Decoded images that are to be drawn are kept, within `_KEPT_BYTES`; the others are read again.
    """

    def __init__(self) -> None:
        self._task: Decoders
        self._kept: dict[tuple[int, int], Image] = {}  # by task and image; the oldest first

    def answer(
        self, task: Decoders | None, name: str, arguments: tuple[Any, ...]
    ) -> tuple[bool, Any]:
        """(True, result) of a request, or (False, its error).

        Args:
            task: the task from now on; None for the last one.
            name: name of the method to call: `call`, `load` or `finish`.
            arguments: arguments of that method.
        """
        if task is not None:
            self._task = task
        try:
            result = getattr(self, name)(*arguments)
            if isinstance(result, UnusableImage) and result.status == "unsupported" and self._kept:
                self._kept.clear()  # kept images may take the memory that this one needs
                result = getattr(self, name)(*arguments)
            return True, result
        except Exception as error:  # not the image's fault: a full disk, a bug
            return False, error

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a function that needs no task."""
        return function(*arguments)

    def load(self, index: int, source: Path | bytes) -> NetworkInput | UnusableImage:
        """Load an image; keep it to draw it later, and hand it over if asked to or if in tiles."""
        loaded = load(index, source, self._task.loading, looks=self._task.looks)
        if isinstance(loaded, UnusableImage):
            return loaded
        if self._task.pictures is not None:
            self._kept[self._task.number, index] = loaded.decoded
            held = sum(kept.pixels.nbytes for kept in self._kept.values())
            while held > _KEPT_BYTES and len(self._kept) > 1:
                held -= self._kept.pop(next(iter(self._kept))).pixels.nbytes
        handed = self._task.keep_image or not loaded.view.whole
        return replace(loaded, image=loaded.image if handed else None)

    def finish(self, index: int, source: Path | bytes, *arguments: Any) -> Any:
        """Draw the pictures of an image, which is read again if it wasn't kept, and forget it."""
        try:
            image = self._kept.pop((self._task.number, index), None)
            if image is None:
                image = read.read_image(source, self._task.loading.decoding)
            # Drawing doesn't depend on the file's content, so its time needs no limit.
            signal.setitimer(signal.ITIMER_PROF, 0)
            return self._task.pictures.write(image, *arguments)
        except OutputError:  # every further image will fail likewise
            raise
        except Exception as error:
            return to_unusable(index, described(index, source), error)
