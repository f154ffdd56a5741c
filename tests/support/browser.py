"""Drives a Chromium that is installed, over the pipe of its DevTools protocol."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A page of a browser: `command` is a method of the protocol, `run` is JavaScript."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._number, self._held, self._session = 0, b"", dict[str, str]()
        self.said: list[str] = []  # errors of scripts, and what the policy has refused
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (told := self._next()).get("id") != self._number:
            pass
        assert "error" not in told, told["error"]
        return told["result"]

    def _next(self) -> dict[str, Any]:
        """Read the next message; note what is wrong with the page."""
        while b"\0" not in self._held:
            got = os.read(self._reader, 1 << 20)
            assert got, "the browser has ended"
            self._held += got
        message, _, self._held = self._held.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        if told.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(told["params"]["exceptionDetails"]))
        elif told.get("method") == "Log.entryAdded":
            entry = told["params"]["entry"]
            self.said += [entry["text"]] if entry["source"] != "network" else []
        elif told.get("method") == "Page.javascriptDialogOpening":
            self.said.append("dialog: " + told["params"]["message"])
        return told

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited."""
        told = self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, condition: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}"
            time.sleep(0.03)

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        code = {"Enter": 13, "Escape": 27}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def open(self, url: str, width: int, height: int, scheme: str, phone: bool) -> None:
        """Open a page on a screen of this size, light or dark."""
        self.said.clear()
        scale = 2 if phone else 1
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)
        self.command("Page.navigate", url=url)

    def take_picture(self, path: Path) -> None:
        picture = self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol wants file descriptors 3 and 4.
        start = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        process = subprocess.Popen(
            ["bash", "-c", start, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        try:
            yield Browser(our_in, our_out)
        finally:
            process.kill()
            process.wait()
            os.close(our_in)
            os.close(our_out)
