"""Headless Chromium over its debugging pipe: no driver, no port, no further package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FAINT = """(selector) => {
  const channels = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (n) => { for (; n; n = n.parentElement) {
    const c = channels(getComputedStyle(n).backgroundColor);
    if (c.length && (c.length < 4 || c[3] === 1)) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll(selector)].filter((n) => {
    const own = [...n.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    const left_out = n.closest('svg, .unseen, :disabled, .zero, option');
    if (!own || left_out || !n.offsetParent) return false;
    const [a, b] = [light(channels(getComputedStyle(n).color)), light(ground(n))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  }).map((n) => n.textContent);
}"""
_CODES = {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "End": 35, " ": 32} | {
    f"Arrow{side}": 37 + i for i, side in enumerate(("Left", "Up", "Right", "Down"))
}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """The browser's path; without one the test is skipped, but where `CI` is set it fails."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        message = "no Chromium here; `make browser` installs it"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found


class Browser:
    """One page. Every request, console message and error that it makes is noted."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._ids = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "navigated" in str(answer.get("error")):  # the page is being changed
                    return {"result": {}}
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, page: Path | str, *, width: int = 1366, height: int = 768) -> None:
        """Load a file or an address, and wait until its scripts have run."""
        self.resize(width, height)
        address = page if isinstance(page, str) else page.as_uri()
        self.call("Page.navigate", url=address)
        self.until("document.readyState + location.href", f"complete{address}", seconds=60)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def resize(self, width: int, height: int) -> None:
        """The size of the window's inside, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, **features: str) -> None:
        """Media features, `prefers_color_scheme="dark"` for one."""
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, value: Any, *, seconds: float = 30.0) -> None:
        """Wait until an expression has a value: some events come a moment after their cause."""
        end = time.perf_counter() + seconds
        while (found := self.evaluate(expression)) != value:
            assert time.perf_counter() < end, (expression, found, value)
            time.sleep(0.005)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that a selector names."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].map((n) => n.textContent)"
        return list(self.evaluate(found))

    def text(self, identifier: str) -> str:
        """The text of the element with an id."""
        return str(self.evaluate(f"document.getElementById({identifier!r}).textContent"))

    def set(self, identifier: str, value: object, *events: str) -> Any:
        """Give a control a value and send it events, `input` alone if none is named."""
        sent = "".join(f"n.dispatchEvent(new Event({event!r}));" for event in events or ("input",))
        node = f"document.getElementById({identifier!r})"
        return self.evaluate(
            f"((n) => {{ n.value = {json.dumps(value)}; {sent} return n.value; }})({node})"
        )

    def fits(self, *widths: int) -> None:
        """Fail unless the page fits windows of these widths without scrolling sideways."""
        for width in widths:
            self.resize(width, 768)
            assert self.evaluate("document.documentElement.scrollWidth") <= width, width

    def faint(self, selector: str) -> list[str]:
        """Texts whose contrast with their ground is below 4.5 to 1 (WCAG 2.2, AA)."""
        return list(self.evaluate(f"({_FAINT})({json.dumps(selector)})"))

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key as the keyboard sends it, to whatever has the focus."""
        code = _CODES.get(key, 0)
        text = key if len(key) == 1 else {"Enter": "\r"}.get(key, "")
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """The mouse's button on the middle of an element."""
        box = self.evaluate(
            f"((node) => {{ node.scrollIntoView({{block: 'nearest'}});"
            "const {left, top, width, height} = node.getBoundingClientRect();"
            f"return [left + width / 2, top + height / 2]; }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        self.mouse(*box)

    def mouse(self, x: float, y: float, *, to: tuple[float, float] | None = None) -> None:
        """The mouse's button at a point of the window; let go at another one."""
        end = to or (x, y)
        for kind, at in (("Pressed", (x, y)), ("Moved", end), ("Released", end)):
            mouse = {"x": at[0], "y": at[1], "button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **mouse)

    def print_to(self, file: Path) -> None:
        """The page as a PDF."""
        paper = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.7)
        file.write_bytes(base64.b64decode(paper["data"]))

    def requests(self) -> list[str]:
        """Addresses asked for since the start, without the pictures that lie in the page itself."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        urls = [e["params"]["request"]["url"] for e in sent]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Errors, warnings and messages on the console."""
        noted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e["method"] in noted]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser went away"
            self._unread += chunk
        message, self._unread = self._unread.split(b"\0", 1)
        return dict(json.loads(message))


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """A fresh browser that leaves nothing behind but the folder `profile`."""
    command = [
        find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-pipe",
        "--force-color-profile=srgb", f"--user-data-dir={profile}",
    ]  # fmt: skip
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    # The browser reads file descriptor 3 and writes 4.
    shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "browser", *command],
        pass_fds=(read_commands, write_answers),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(write_commands, read_answers)
    finally:
        os.close(write_commands)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read_answers)
