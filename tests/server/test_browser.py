"""The page in a real browser: light, dark and on a phone, with pictures to look at.

The pictures are in the folder that MTPBUILD_PICTURES names, else in the test's temporary one.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.browser import CHROMIUM, Browser, browser
from tests.support.live_server import Live
from tests.support.served import saying, served

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
ANSWER = """<think>A thought, first.
It has two lines.</think>## What there is

**Bold**, *italic*, `code`, [a link](https://a.example/) and [none](javascript:attack()).
<script>attack()</script><img src=x onerror="attack()"> ![image](https://a.example/b.png)

1. first
2. second
   - nested

| name | value |
|:--|--:|
| one | 1 |
| two | 22 |

```python
def hello(world):
    return 1 + 2  # a line that is long enough to be wider than the screen of a phone, and than this
```

> quoted</s>"""
ATTACK = "window.attack = () => { window.attacked = true; }"
IDLE = "document.body?.dataset.state === 'idle'"
DRAWN = f"{IDLE} && document.querySelector('.answer:last-child blockquote') !== null"


class Screen(NamedTuple):
    """A size of the page's window, and the scheme that its user prefers."""

    width: int
    height: int
    scheme: str
    phone: bool = False


SCREENS = {
    "light": Screen(1200, 850, "light"),
    "dark": Screen(1200, 850, "dark"),
    "phone": Screen(390, 800, "light", phone=True),
}


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("MTPBUILD_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_page(page: Browser, server: Live, screen: Screen) -> None:
    page.open(server.url, *screen)
    page.until(IDLE)
    page.run(ATTACK)


def ask(page: Browser, text: str, done: str = IDLE) -> None:
    """Type a question as a user does, and wait for the answer."""
    page.run("document.getElementById('text').focus()")
    page.command("Input.insertText", text=text)
    page.press("Enter")
    page.until(f"document.getElementById('text').value === '' && {done}")


@pytest.mark.parametrize("name", SCREENS)
def test_the_page(name: str, page: Browser, pictures: Path) -> None:
    slow: dict[str, Any] = {"step_s": 0.005, "draft_is_right": lambda position: position % 5 != 0}
    with served(**saying(ANSWER), **slow, max_seq_len=1200) as (server, _):
        open_page(page, server, SCREENS[name])
        page.take_picture(pictures / f"{name}-empty.png")
        ask(page, "hi", "document.querySelector('.answer pre')")
        page.take_picture(pictures / f"{name}-answering.png")
        page.until(DRAWN)
        page.take_picture(pictures / f"{name}-answered.png")
        shown = page.run("document.querySelector('.content').innerText")
        assert "<script>attack()</script>" in shown
        links = page.run("[...document.querySelectorAll('.content a')].map((a) => a.href)")
        assert links == ["https://a.example/", "https://a.example/b.png"]
        assert page.run("document.querySelectorAll('.content :is(script, img)').length") == 0
        assert page.run("document.querySelectorAll('.content .draft').length") > 50
        assert not page.run("document.querySelector('.answer details').open")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")

        ask(page, "And this question has more than one line:\n\n    x = 1\n    y = 2")
        ask(page, "A third one")
        page.until("document.querySelector('.cut:not([hidden])')")
        page.run("document.querySelector('.cut:not([hidden])').scrollIntoView()")
        page.take_picture(pictures / f"{name}-cut.png")
        ask(page, "far too long " * 150)
        assert "maximum context length" in page.run(
            "document.querySelector('.answer:last-child').innerText"
        )
        page.take_picture(pictures / f"{name}-overflow.png")

        page.run("document.getElementById('system').value = 'Be brief.'")
        page.run("document.getElementById('system').dispatchEvent(new Event('input'))")
        before = page.run("document.querySelector('#turns').innerText")
        page.command("Page.reload")
        page.until(f"{IDLE} && document.querySelectorAll('.answer').length === 4")
        page.until(f"document.querySelector('#turns').innerText === {before!r}")
        page.run("document.querySelector('#prompt').open = true")
        page.run("document.querySelectorAll('.question button')[1].click()")  # Edit of the first
        page.run("document.querySelector('#scroll').scrollTop = 0")
        page.take_picture(pictures / f"{name}-editing.png")
        page.run("document.querySelector('#new').click()")
        ask(page, "Another conversation", DRAWN)
        page.run("document.querySelector('#menu').click()")
        page.take_picture(pictures / f"{name}-conversations.png")
        assert page.run("document.querySelectorAll('#chats div').length") == 2
        assert not page.run("window.attacked")
        assert page.said == []
        page.run("localStorage.clear()")


def test_the_policy_refuses_scripts_that_get_into_an_answer(page: Browser) -> None:
    with served() as (server, _):
        open_page(page, server, SCREENS["light"])
        page.run("document.querySelector('#turns').innerHTML = '<img src=x onerror=\"attack()\">'")
        page.run("new Promise((go) => setTimeout(go, 200))")
        assert not page.run("window.attacked")
        assert any("Content Security Policy" in output for output in page.said)
