"""A real browser, driven over its debugging pipe.

Chromium reads commands from file descriptor 3 and writes answers to 4, as JSON
with a zero byte at the end, so that no package is needed to talk to it.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
SECONDS = 60
# Moves the two ends of the pipes to where Chromium expects them.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab.

    Attributes:
        complaints: what the browser reported: errors and warnings of the
            console, exceptions, and requests for anything but the page.
    """

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._number, self._buffer, self._session = 0, b"", None
        self._page, self._events = None, []
        self.complaints = []
        target = self._send("Target.createTarget", url="about:blank")
        attached = self._send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, path, width: int) -> None:
        """Shows a file in a window of that many pixels."""
        self._page = path.resolve().as_uri()
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._send("Emulation.setScrollbarsHidden", hidden=True)
        self._events.clear()
        self._send("Page.navigate", url=self._page)
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, which may be an object."""
        found = self._send(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path) -> None:
        """Writes the whole page as a PNG file."""
        found = self._send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _send(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self):
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0, left))
            assert ready, "Chromium does not answer."
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, "Chromium has ended."
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._note(message.get("method"), message.get("params"))
        return message

    def _note(self, event, params):
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        if event == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        if event == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        if event == "Network.requestWillBeSent":
            if params["request"]["url"] != self._page:
                self.complaints.append(params["request"]["url"])


@contextlib.contextmanager
def browser():
    """Starts Chromium with a new profile, and ends it."""
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(commands), str(answers)]
            + [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        try:
            yield Browser(to_browser, from_browser)
        finally:
            os.close(to_browser)  # Which it takes as the order to end.
            os.close(from_browser)
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
