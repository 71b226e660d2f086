"""A browser without a window, driven over the DevTools protocol.

The messages go through a pipe, not through a port: other users of the machine can't join in, and
nothing but this file is needed. https://chromedevtools.github.io/devtools-protocol/ describes them.
"""

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 180.0
"""How long to wait for what comes within a second on a quiet machine."""

_NAMES = "MAP rebound.test 127.0.0.1,MAP * ~NOTFOUND,EXCLUDE 127.0.0.1"
"""No name leads away from this machine, and one that is not its own leads to it."""

KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Space": (" ", 32, " "),
    "Escape": ("Escape", 27, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
}


def find_browser() -> str | None:
    """The path of the browser; None if there is none."""
    return shutil.which("chromium-headless-shell") or shutil.which("chrome-headless-shell")


class Browser:
    """One process of the browser. Its profile is in `directory`, and its names resolve to nothing
    except on this machine."""

    def __init__(self, directory: Path) -> None:
        binary = find_browser()
        assert binary is not None, (
            "no chromium-headless-shell here: WITH_BROWSER=1 scripts/bootstrap"
        )
        to_browser, self._into = os.pipe()
        self._out, from_browser = os.pipe()
        command = [
            *("bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash"),
            *(binary, "--remote-debugging-pipe", "--no-sandbox", f"--user-data-dir={directory}"),
            *("--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
            f"--host-resolver-rules={_NAMES}",
            "--proxy-server=direct://",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids = iter(range(1, 1 << 60))
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._into)
        self._thread.join()
        os.close(self._out)

    def _receive(self) -> None:
        data = b""
        while piece := os.read(self._out, 1 << 16):
            *messages, data = (data + piece).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self._answers[message["id"]].put(message)
                elif listener := self._listeners.get(message.get("sessionId", "")):
                    listener(message["method"], message["params"])
        for answer in list(self._answers.values()):
            answer.put({"error": {"message": "the browser has ended"}})

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = next(self._ids)
        answer = self._answers[number] = queue.Queue()
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._into, data) :]
        found = answer.get(timeout=PATIENCE_S)
        del self._answers[number]
        assert "error" not in found, (method, found["error"])
        result: dict[str, Any] = found["result"]
        return result

    @contextlib.contextmanager
    def page(self, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator["Page"]:
        """Open an empty page, with storage of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        page = Page(self, target["targetId"])
        page.resize(width, height)
        page.prefer(scheme)
        try:
            yield page
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def listen(self, session: str, listener: Callable[[str, dict[str, Any]], None]) -> None:
        """Call `listener(method, parameters)` for each event of a page."""
        self._listeners[session] = listener


class Page:
    """One page, and what has happened in it."""

    def __init__(self, browser: Browser, target: str) -> None:
        self._browser = browser
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.errors: list[str] = []
        """Errors of scripts, of loading, and of the content security policy."""
        self.received_bytes = 0
        """What all answers had on the wire."""
        self.urls: list[str] = []
        browser.listen(self._session, self._note)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _note(self, method: str, given: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description", details)))
            case "Log.entryAdded" if given["entry"]["level"] == "error":
                self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.urls.append(given["request"]["url"])
            case "Network.loadingFinished":
                self.received_bytes += int(given["encodedDataLength"])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """Set what the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        assert "errorText" not in self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript, or what its promise gives."""
        found = self.send(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(AssertionError):  # the page may be between two documents
                if self.evaluate(f"Boolean({expression})"):
                    return
            assert time.monotonic() < deadline, (expression, self.errors)
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        name, code, text = KEYS[key]
        given = {"key": name, "code": key, "windowsVirtualKeyCode": code}
        down = "keyDown" if text else "rawKeyDown"
        self.send("Input.dispatchKeyEvent", type=down, **given, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def screenshot(self, *, whole: bool = True) -> bytes:
        """Return the page as PNG."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])
