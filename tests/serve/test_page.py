"""The page, in a real browser, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.live import Live, Standin, serving
from warpline import LLM
from warpline.serve.page import page
from warpline.serve.state import Settings

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="there is no Chromium here: make test installs it for CI"
)
PROMPT = "Once upon a time, a little robot"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Serve the embedded model with the executor that compiles nothing."""
    with serving(LLM(device="cpu", dtype="fp32", executor="torch", max_batch=4)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser: Any, server: Live) -> Iterator[Open]:
    """Open the page; forbidden behaviour of a page fails the test at the end."""
    wrong: list[str] = []
    contexts = []

    def open_page(
        width: int = 1200, height: int = 800, scheme: str = "light", *, expects: str = "\0", url: str = server.url,
        **named: Any,
    ) -> Any:  # fmt: skip
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **named)
        contexts.append(context)
        context.set_default_timeout(20_000)
        found = context.new_page()
        found.on("console", lambda message: wrong.extend([message.text] if expects not in message.text else []))
        found.on("pageerror", lambda error: wrong.append(str(error)))
        ours = (url, "data:")
        found.on("request", lambda request: wrong.extend([] if request.url.startswith(ours) else [request.url]))
        found.goto(url)
        return found

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def text(tab: Any) -> str:
    return str(tab.locator("#text").input_value())


def written(tab: Any, answers: int = 1) -> None:
    """Wait for the end of `count` answers."""
    tab.locator(f"body[data-answers='{answers}']").wait_for()


def test_write_and_try_again(visit: Open) -> None:
    tab = visit()
    tab.fill("#max_tokens", "24")
    tab.fill("#text", PROMPT)
    tab.keyboard.press("Control+Enter")
    written(tab)
    first = text(tab)
    assert first.startswith(PROMPT)
    assert len(first) > len(PROMPT) + 20
    assert tab.locator("#layer .you").inner_text() == PROMPT
    assert tab.locator("#layer .model").text_content() == first.removeprefix(PROMPT)
    assert "24 tokens" in tab.locator("#said").inner_text()
    assert "µs a token" in tab.locator("#limit").inner_text()
    tab.click("#again")
    written(tab, 2)
    assert text(tab).startswith(PROMPT)
    assert text(tab) != first
    tab.click("#undo")
    assert text(tab) == first
    # Text typed into the middle is marked as the user's; other marks do not change.
    tab.locator("#text").evaluate("node => { node.focus(); node.setSelectionRange(5, 9); }")
    tab.keyboard.type("upon")
    assert text(tab) == first
    tab.keyboard.type("!")
    assert text(tab) == first[:9] + "!" + first[9:]
    assert tab.locator("#layer .model").text_content() == first.removeprefix(PROMPT)


def test_stop_ends_the_work(visit: Open, server: Live) -> None:
    tab = visit()
    tab.fill("#max_tokens", "480")
    tab.fill("#text", PROMPT)
    tab.keyboard.press("Control+Enter")
    tab.locator("#layer .model").wait_for()
    assert server.state.answers
    tab.keyboard.press("Escape")
    tab.locator("#said", has_text="Stopped").wait_for()
    assert len(text(tab)) > len(PROMPT)
    server.wait_until_empty(5)


def test_tokens_and_alternatives(visit: Open, server: Live) -> None:
    tab = visit()
    tab.fill("#max_tokens", "12")
    tab.fill("#text", PROMPT)
    tab.keyboard.press("Control+Enter")
    written(tab)
    whole = text(tab)
    tab.click("#tokens")
    tokens = tab.locator(".token")
    tokens.first.wait_for()
    assert "".join(tokens.all_text_contents()) == whole
    body = {"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 5}
    scored = server.request("/v1/completions", body)[1]["choices"][0]["logprobs"]
    at = scored["tokens"].index(" a")
    tokens.nth(at).hover()
    card = tab.locator("#card")
    card.wait_for()
    best = max(scored["top_logprobs"][at].items(), key=lambda pair: float(pair[1]))
    assert best[0].strip() in card.locator(".other").first.inner_text()
    assert card.locator(".other").count() == 5
    tab.mouse.move(5, 5)
    card.wait_for(state="hidden")
    # The keyboard does as well: along the tokens, into the alternatives, and one of them is taken.
    tokens.first.focus()
    for _ in range(at):
        tab.keyboard.press("ArrowRight")
    assert tab.locator(".token:focus").text_content() == " a"
    tab.keyboard.press("Enter")
    tab.keyboard.press("ArrowDown")
    chosen = tab.locator(".other:focus .word").inner_text().replace("␣", " ")
    tab.keyboard.press("Enter")
    written(tab, 2)
    kept = "".join(scored["tokens"][:at])
    assert text(tab).startswith(kept + chosen)
    tokens.first.wait_for()
    assert "".join(tokens.all_text_contents()) == text(tab)


def test_drafts_side_by_side(visit: Open) -> None:
    tab = visit()
    tab.fill("#max_tokens", "8")
    tab.fill("#n", "3")
    tab.fill("#text", PROMPT)
    tab.click("#write")
    written(tab)
    drafts = tab.locator(".draft div")
    assert drafts.count() == 3
    assert len(set(drafts.all_text_contents())) > 1
    second = drafts.nth(1).text_content()
    tab.locator(".draft button").nth(1).click()
    assert text(tab).removeprefix(PROMPT).strip() == str(second).strip()
    assert tab.locator(".draft").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (320, "light")])
def test_small_screens(visit: Open, width: int, scheme: str) -> None:
    tab = visit(width, 720, scheme)
    tab.fill("#max_tokens", "8")
    tab.fill("#text", PROMPT)
    tab.click("#write")
    written(tab)
    tab.locator("#more summary").click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", shade)[:3])) / 3
    assert light < 60 if scheme == "dark" else light > 200
    for button in tab.locator("button:visible").all():
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    # The theme can be chosen, and every control has a name for screen readers.
    for expected in ("light", "dark"):
        tab.click("#theme")
        assert tab.evaluate("getComputedStyle(document.documentElement).colorScheme") == expected
    for role in ("button", "textbox", "spinbutton"):
        assert tab.get_by_role(role).count() == tab.get_by_role(role, name=re.compile(r"\w")).count() > 0


def test_errors_are_said(visit: Open) -> None:
    tab = visit(expects="ERR_FAILED")  # the browser's message for a broken connection
    tab.route("**/v1/completions", lambda route: route.abort())
    tab.fill("#text", PROMPT)
    tab.click("#write")
    tab.get_by_role("alert").filter(has_text="cannot be reached").wait_for()
    tab.unroute("**/v1/completions")
    refused = json.dumps({"error": {"message": "the prompt has 600 tokens"}})
    tab.route("**/v1/completions", lambda route: route.fulfill(status=200, body="data: " + refused + "\n\n"))
    tab.click("#write")
    tab.get_by_role("alert").filter(has_text="600 tokens").wait_for()
    assert text(tab) == PROMPT  # nothing is lost


def test_one_small_file_that_may_do_little() -> None:
    body, headers = page()
    assert len(body) < 100_000
    policy = dict(headers)[b"content-security-policy"].decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for attribute in (b" style=", b" onclick=", b'src="http', b'href="http', b"url(", b"@import"):
        assert attribute not in body


def test_a_key_that_the_browser_asks_for(visit: Open) -> None:
    with serving(Standin(), Settings(api_keys=("secret",))) as guarded:
        tab = visit(url=guarded.url, http_credentials={"username": "anybody", "password": "secret"})
        tab.fill("#text", PROMPT)
        tab.click("#write")
        written(tab)
        assert text(tab).startswith(PROMPT + " word word")
        tab.context.close()
