"""Messages of commands on the terminal, and signals that end them.

A command prints its results and logs everything else:

| level    | what                                             | on                 | with -q |
|----------|--------------------------------------------------|--------------------|---------|
| error    | why nothing or not all was done                  | stderr, `error:`   | shown   |
| warning  | what may make results other than expected        | stderr, `warning:` |         |
| NOTE     | what is worth knowing                            | stderr, `note:`    |         |
| PROGRESS | how far a long stage is                          | stderr             |         |
| info     | remarks, hints, where else to look               | stdout             |         |
| debug    | what was decided and why, times of stages        | stderr, with -v    |         |
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import Any, ClassVar, TextIO

from anomaly.errors import visible

NOTE, PROGRESS = 27, 22
_NAMES = {logging.ERROR: "error", logging.WARNING: "warning", NOTE: "note"}

log = logging.getLogger(__name__)


def add_logging(parser: argparse.ArgumentParser) -> None:
    """Add the options --quiet and --verbose, which every command takes."""
    group = parser.add_argument_group("messages").add_mutually_exclusive_group()
    group.add_argument("-q", "--quiet", action="store_true", help="only results and errors")
    group.add_argument(
        "-v", "--verbose", action="store_true", help="also decisions with their reasons, and times"
    )


@contextmanager
def plain_output() -> Iterator[None]:
    """Escape control characters in all output of the `with` block.

    Names of files, settings and models, and messages of libraries, may hold such characters.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every file name can be shown
    sys.excepthook = _show_defect
    with redirect_stdout(_Plain(sys.stdout)), redirect_stderr(_Plain(sys.stderr)):
        yield


# The user and password in an address.
_LOGIN = re.compile(r"(?<=://)[^\s'\"]*@")


def _plain(text: str) -> str:
    """A text whose control characters are escaped, ends of lines aside, and logins hidden."""
    return "\n".join(map(visible, _LOGIN.sub("…@", text).split("\n")))


def command_line(arguments: Sequence[str]) -> str:
    """A command as typed; … stands for words with :// or @, which may hold secrets."""
    return shlex.join(re.sub(r"(?s)[^=]*(://|@).*", "…", argument) for argument in arguments)


def _show_defect(*error: Any) -> None:
    """Print an error's traceback as plain text; stands in for `sys.excepthook`."""
    print(_plain("".join(traceback.format_exception(*error))), end="", file=sys.stderr)


class _Plain:
    """A stream that escapes control characters, ends of lines aside, and hides logins.

    Attributes:
        unescaped: the stream below, for text that moves the cursor.
    """

    def __init__(self, unescaped: TextIO) -> None:
        self.unescaped = unescaped

    def write(self, text: str) -> int:
        """Write a text as plain text."""
        self.unescaped.write(_plain(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


class _Lines(logging.Formatter):
    """Log records as lines of text; a line break in a name can't forge another message.

    Line breaks stay only before an indented line, as in the program's own messages.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """A record's text, its inner line breaks written as `\\n`."""
        record.message = re.sub(r"(?<!^)\n(?!  )", r"\\n", record.message)
        return super().formatMessage(record)


@contextmanager
def log_to_terminal(*, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Print log records of the `with` block, as the module's table says.

    Args:
        quiet: print errors alone.
        verbose: print decisions and times as well.
    """
    own = logging.getLogger("anomaly")
    level, handler = own.level, _Terminal()
    handler.setFormatter(_Lines())
    handler.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    own.setLevel(min(handler.level, logging.INFO))
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
        own.setLevel(level)


def _is_quiet() -> bool:
    """True if only results and errors are shown."""
    shown = [h.level for h in logging.root.handlers if isinstance(h, _Terminal)]
    return bool(shown) and min(shown) >= logging.ERROR


class _Terminal(logging.Handler):
    """Prints log records; notes, warnings and errors begin with the name of their level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record: remarks on stdout, all others on stderr."""
        stream = sys.stdout if record.levelno == logging.INFO else sys.stderr
        text = _plain(self.format(record))
        if record.levelno >= NOTE:
            text = f"{_NAMES.get(record.levelno, 'error')}: {text}"
        if stream is sys.stderr and stream.isatty():
            text = f"\r\x1b[K{text}"  # replaces the progress line
        print(text, file=getattr(stream, "unescaped", stream), flush=True)


def is_interactive() -> bool:
    """True if a person reads the output and can answer at the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def agreed(doubts: Sequence[str], options: argparse.Namespace) -> bool:
    """Warn of doubts; True if there are none, or `--yes` or a person at the terminal agrees."""
    for doubt in doubts:
        log.warning(doubt)
    if options.yes or not doubts:
        return True
    answer = input("Go on anyway? [y/N] ") if is_interactive() else ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    log.error("refused: nothing was changed; look at these images, or add --yes")
    return False


_PLAIN_SECONDS = 30.0  # between two lines of progress where stderr is no terminal


class ProgressLine:
    """Shows the progress of a stage on stderr: done, total, rate and the time left.

    On a terminal one line changes as the work goes on. Elsewhere, as in a log, a line is added
    every half minute. With --quiet nothing is shown.

    Use it in a `with` statement, and call it with (stage, done, total).
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty() and not _is_quiet()
        self._stage = ""
        self._done = self._total = 0
        self._started = self._shown = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_stage()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` pieces of work in a stage are finished."""
        now = time.monotonic()
        if stage != self._stage:
            self._end_stage()
            self._started, self._shown = now, 0.0 if self._terminal else now
        self._stage, self._done, self._total = stage, done, total
        if not self._terminal:
            if now - self._shown >= _PLAIN_SECONDS:
                self._shown = now
                log.log(PROGRESS, self._text())
        elif now - self._shown >= 0.1 or done >= total:
            self._shown = now
            stream = getattr(sys.stderr, "unescaped", sys.stderr)
            print(f"\r  {self._text()}\x1b[K", end="", file=stream, flush=True)

    def _text(self) -> str:
        """The line, such as `scoring: 30 of 83, 9.5 a second, about 6 s left`."""
        text = f"{self._stage}: {self._done} of {self._total}"
        if self._done >= self._total:
            return f"{text}, finishing"
        seconds = time.monotonic() - self._started
        if seconds <= 0.2 or not self._done:  # too early to tell the rate
            return text
        rate = self._done / seconds
        return f"{text}, {rate:.1f} a second, {_time_left((self._total - self._done) / rate)}"

    def _end_stage(self) -> None:
        """Leave the line of a finished stage on the terminal, and log the stage's time."""
        if self._stage:
            if self._terminal:
                print(file=sys.stderr)
            seconds = time.monotonic() - self._started
            log.debug("%s: %d of %d in %.1f s", self._stage, self._done, self._total, seconds)


def _time_left(seconds: float) -> str:
    """A duration as a phrase: `about 3 min left`."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"about {seconds / length:.2g} {unit} left"
    return f"about {seconds:.0f} s left"


# Time after a signal in which a command finishes the images in hand; then its process ends.
PATIENCE_SECONDS = 8.0


class Interrupted(KeyboardInterrupt):
    """Raised by a signal that ends the command at once; the message says what to do next.

    Attributes:
        exit_code: 128 + the signal's number, as shells expect.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Stopping:
    """Stops a command at a signal. Use it in a `with` statement.

    A thread ends the process `PATIENCE_SECONDS` after a signal, unless the outermost block has
    ended by then or the command is at work: a long call of a library keeps Python from handling
    signals itself.

    Args:
        politely: the first signal is only noted, so that the command can finish the images in hand;
            the second one interrupts. Otherwise the first one interrupts.
        then: advice in the message of an interruption, for a command that stops politely.

    Attributes:
        signal: number of the first signal; None before one has come.
        at_work: the command is finishing accepted work, which only a second signal cuts short.
    """

    _open: ClassVar[list[Stopping]] = []  # outermost first

    def __init__(self, *, politely: bool = True, then: str = "continue with --resume") -> None:
        self.signal: int | None = None
        self.at_work = False
        self._politely = politely
        self._message = f"interrupted; {then}" if politely else "interrupted"
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # Python allows it only there
            self._open.append(self)
            if self._open[0] is self:
                self._reader, writer = socket.socketpair()
                writer.setblocking(False)
                # Python writes the number of each signal there, even during a library's long call.
                self._wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self._end_process, args=(writer,), daemon=True).start()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:  # empty outside the main thread, where signals can't be handled
            self._open.remove(self)
            if not self._open:
                signal.set_wakeup_fd(self._wakeup)
                self._reader.shutdown(socket.SHUT_RDWR)  # ends the thread of `_end_process`

    def has_come(self) -> bool:
        """True once a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells expect; 128 before a signal."""
        return 128 + (self.signal or 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note it, and interrupt unless it is the first of a polite stop."""
        interrupts = self.signal is not None or not self._politely
        if interrupts and _importing(frame):
            # The signal comes again, until the import is finished.
            later = threading.Timer(0.05, signal.raise_signal, (number,))
            later.daemon = True
            later.start()
            return
        self.signal = self.signal or number
        if interrupts:
            raise Interrupted(self.signal, self._message)

    def _end_process(self, writer: socket.socket) -> None:
        """End the process `PATIENCE_SECONDS` after a signal, unless the command ends before."""
        with self._reader, writer:
            first = self._reader.recv(1)  # the signal's number
            if not first:  # the socket was shut: the outermost block was left
                return
            inner = self._open[-1] if self._open else self  # a command may end right now
            if inner._politely:
                _say("stopping: work in hand is finished first; a second signal ends it at once")
            end = time.monotonic() + PATIENCE_SECONDS
            while (left := end - time.monotonic()) > 0:
                self._reader.settimeout(min(left, 0.5))
                with suppress(TimeoutError):
                    if not self._reader.recv(1):
                        return
                    inner.at_work = False
                if inner.at_work:
                    end = time.monotonic() + PATIENCE_SECONDS
        _say(inner._message)
        os._exit(128 + first[0])


def _importing(frame: FrameType | None) -> bool:
    """True while a module is imported: extension modules turn an interruption into an error."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _say(message: str) -> None:
    """Print a message on stderr at once, past the log."""
    with suppress(OSError, ValueError):  # stderr may be closed
        print(message, file=sys.stderr, flush=True)
