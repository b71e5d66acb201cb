"""Headless Chromium, driven by its DevTools protocol over a pipe: no driver, no library, no port.

with browser.started() as chromium:
    page = chromium.open("file:///tmp/index.html", width=800)
    page.run("document.title")
    page.complaints        # what the console said, and what failed to load
"""

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.support import comes, system

LIMIT_S = 60  # of an answer
# Root needs --no-sandbox: it opens our own files only. Fonts without hinting have the same widths everywhere.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--no-default-browser-check", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-extensions", "--remote-debugging-pipe", "--hide-scrollbars"),
    "--font-render-hinting=none",
)
# Pairs of texts that overlap: the boxes of each text node and of each text of a picture, where they can be seen. Source
# scrolls within its box, so what it hides has a place too.
OVERLAPS = """(() => {
  const boxes = [];
  const add = (said, box, of) => {
    if (box.width > 1 && box.height > 1) boxes.push({said: said.trim().slice(0, 60), box, of});
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("svg, .source pre")) continue;
    if (!parent.checkVisibility({visibilityProperty: true})) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) add(node.data, box, node);
  }
  for (const one of document.querySelectorAll("svg text")) {
    if (one.checkVisibility()) add(one.textContent, one.getBoundingClientRect(), one);
  }
  boxes.sort((a, b) => a.box.top - b.box.top);
  const found = [];
  boxes.forEach((a, n) => {
    for (let m = n + 1; m < boxes.length && boxes[m].box.top < a.box.bottom; m++) {
      const b = boxes[m];
      if (a.of === b.of) continue;
      const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
      const high = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
      if (wide > 1 && high > 1) found.push([a.said, b.said, Math.round(wide), Math.round(high)]);
    }
  });
  return {boxes: boxes.length, found};
})()"""


class Page:
    """A tab. complaints: errors and warnings of the console, exceptions, and requests that failed."""

    def __init__(self, chromium: "Chromium", session: str) -> None:
        self.chromium, self.session, self.complaints = chromium, session, []

    def call(self, method: str, **given: Any) -> dict:
        return self.chromium.call(method, self.session, **given)

    def go(self, url: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.chromium.wait(self.session, "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """What a script returns. AssertionError: it failed."""
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a script returns what is true: events come some time after what caused them."""
        assert comes(lambda: self.run(script), LIMIT_S), f"not within {LIMIT_S} s: {script}"

    def size(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def overlaps(self) -> dict:
        """boxes: how many texts there are; found: [text, other text, px wide, px high] of each overlap."""
        return self.run(OVERLAPS)


class Chromium:
    """A running browser. Answers come by number, events by session."""

    def __init__(self, process: subprocess.Popen, reads: int, writes: int) -> None:
        self.process, self.reads, self.writes = process, reads, writes
        self.number, self.rest, self.seen = 0, b"", []
        self.pages: dict[str, Page] = {}

    def open(self, url: str = "about:blank", width: int = 1600, theme: str = "light") -> Page:
        """A new tab with `url`."""
        target = self.call("Target.createTarget", None, url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", None, targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for area in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{area}.enable")
        page.size(width)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        page.go(url)
        return page

    def call(self, method: str, session: str | None, **given: Any) -> dict:
        """What a method returns. AssertionError: it was refused."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": given} | ({"sessionId": session} if session else {})
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self.writes, data) :]
        while True:
            said = self._next()
            if said.get("id") == self.number:
                assert "error" not in said, f"{method}: {said['error']}"
                return said["result"]

    def wait(self, session: str, method: str) -> None:
        """Wait for an event that has not been waited for."""
        key = (session, method)
        while key not in self.seen:
            self._next()
        self.seen.remove(key)

    def _next(self) -> dict:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reads], [], [], LIMIT_S)
            assert ready, f"chromium says nothing for {LIMIT_S} s"
            part = os.read(self.reads, 2**20)
            assert part, f"chromium ended with status {self.process.wait()}"
            self.rest += part
        data, _, self.rest = self.rest.partition(b"\0")
        said = json.loads(data)
        if "method" in said:
            self._event(said)
        return said

    def _event(self, said: dict) -> None:
        session, method, given = said.get("sessionId", ""), said["method"], said["params"]
        self.seen.append((session, method))
        if session not in self.pages:
            return
        complaints = self.pages[session].complaints
        if method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            complaints.append(given["entry"]["text"])
        if method == "Runtime.exceptionThrown":
            complaints.append(str(given["exceptionDetails"]))
        if method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            complaints.append(str(given["args"]))
        if method == "Network.loadingFailed" and not given.get("canceled"):
            complaints.append(f"a request failed: {given['errorText']}")


@contextlib.contextmanager
def started() -> Iterator[Chromium]:
    """A browser with a fresh profile. Skips, or fails, as tests/support/system.py says where there is none."""
    program = system.need("chromium")
    (here_reads, its_writes), (its_reads, here_writes) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium wants its ends as descriptors 3 and 4: dash, for one, knows no others than digits.
        script = f'exec 3<&{its_reads} 4>&{its_writes}; exec "$@"'
        command = ["bash", "-c", script, "chromium", program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, pass_fds=(its_reads, its_writes), **silent)
        for end in (its_reads, its_writes):
            os.close(end)
        chromium = Chromium(process, here_reads, here_writes)
        try:
            yield chromium
        finally:
            with contextlib.suppress(AssertionError, OSError):
                chromium.call("Browser.close", None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            os.close(here_reads)
            os.close(here_writes)
