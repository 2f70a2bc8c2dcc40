"""The web page in headless Chromium, driven over the WebDriver protocol.

Its screenshots go to the folder that ARTIFACTS names, or else a temporary one.
"""

import base64
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.fake_engine import FakeEngine
from tests.live import live

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (DRIVER and BROWSER),
        reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)",
    ),
]


class Browser:
    """One window of a headless browser."""

    def __init__(self, folder: Path):
        self.driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self.driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise AssertionError("chromedriver did not start")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=60)
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        arguments += [f"--user-data-dir={folder}", "--window-size=1100,1000"]
        options = {"binary": BROWSER, "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = ""
        made = self.post("/session", capabilities={"alwaysMatch": wanted})
        self.session = f"/session/{made['sessionId']}"

    def post(self, path: str, **body):
        reply = self.http.post(self.session + path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["value"]

    def open(self, url: str):
        self.post("/url", url=url)

    def script(self, code: str):
        return self.post("/execute/sync", script=f"return {code}", args=[])

    def until(self, code: str):
        deadline = time.monotonic() + 30
        while not (found := self.script(code)):
            assert time.monotonic() < deadline, f"never: {code}"
            time.sleep(0.05)
        return found

    def find(self, selector: str) -> str:
        found = self.post("/element", using="css selector", value=selector)
        return f"/element/{found[ELEMENT]}"

    def write(self, selector: str, text: str):
        self.post(f"{self.find(selector)}/clear")
        self.post(f"{self.find(selector)}/value", text=text)

    def click(self, selector: str):
        self.post(f"{self.find(selector)}/click")

    def screenshot(self, path: Path):
        image = self.http.get(f"{self.session}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(image))

    def complaints(self) -> list[str]:
        """Errors of scripts and refusals of the policy; not the answers 401 that ask for a key."""
        entries = self.post("/se/log", type="browser")
        return [entry["message"] for entry in entries if "401" not in entry["message"]]

    def close(self):
        self.http.delete(self.session)
        self.http.close()
        self.driver.terminate()
        self.driver.wait(30)
        self.driver.stdout.close()


@pytest.fixture
def browser(tmp_path):
    made = Browser(tmp_path / "profile")
    yield made
    made.close()


@pytest.fixture
def artifacts(tmp_path) -> Path:
    folder = Path(os.environ.get("ARTIFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_person_sees_the_ladder_and_the_logprobs_of_a_prompt(browser, artifacts):
    engine = FakeEngine()
    with live(engine, api_key=("secret",)) as url:
        browser.open(url)
        browser.until("!document.querySelector('#key-form').hidden")
        browser.write("#key", "secret")
        browser.click("#key-form button")
        browser.until("document.querySelector('#state').textContent === 'ready'")
        browser.until("document.querySelectorAll('#ladder rect').length === 6")
        tips = browser.script(
            "[...document.querySelectorAll('#ladder title')].map(x => x.textContent)"
        )
        assert tips == [
            "8 tokens: 2 passes, 6.3 % padding",
            "32 tokens: 3 passes, 12.5 % padding",
            "fallback, 64 tokens: 1 passes, 31.3 % padding",
        ]
        assert "too many requests 1" in browser.script(
            "document.querySelector('#fallbacks').textContent"
        )
        browser.write("#prompt", "Hé <b>")
        browser.write("#max-tokens", "3")
        browser.click("#run")
        browser.until("document.querySelectorAll('.token').length")
        tokens = browser.script(
            "[...document.querySelectorAll('.token')].map(x => "
            "[x.textContent, x.dataset.logprob ?? null, x.style.backgroundColor, x.title])"
        )
        assert [text for text, *_ in tokens[3:]] == [" ", "<", "b", ">", "a", "b", "c"]
        assert [logprob for _, logprob, *_ in tokens][:3] == [None, "-1", "-2"]
        colours = [colour for _, _, colour, _ in tokens]
        assert colours[0] == "" and len(set(colours[1:7])) == 6 and colours[1] == colours[7]
        assert "logprob -1.000 (36.8 %)" in tokens[7][3] and "-2.000" in tokens[7][3]
        browser.screenshot(artifacts / "page.png")
        browser.open(f"{url}/docs")
        browser.until("document.querySelectorAll('details').length > 10")
        assert browser.complaints() == []


def test_the_page_says_when_the_engine_is_away_and_what_is_wrong_with_a_prompt(browser):
    engine = FakeEngine()
    with live(engine) as url:
        engine.is_ready = False
        browser.open(url)
        browser.until("document.querySelector('#state').textContent === 'starting'")
        engine.is_ready = True
        browser.until("!document.querySelector('#run').disabled")
        browser.write("#prompt", "x" * 200)
        browser.click("#run")
        browser.until("!document.querySelector('#error').hidden")
        error = browser.script("document.querySelector('#error').textContent")
        assert "maximum context length" in error
