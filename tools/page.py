"""Makes pictures of the server's page for the documents: `python -m tools.page` (needs Chromium, extra `dev`)."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.serve.live import serving
from warpline import LLM

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PROMPT = "The dragon opened one eye."
SEED = "7"


def drawn(tab: Any, name: str) -> None:
    tab.mouse.move(0, 0)
    shot = Image.open(io.BytesIO(tab.screenshot()))
    shot.quantize(160, dither=Image.Dither.NONE).save(IMAGES / f"page-{name}.png", optimize=True)


def write(tab: Any, url: str) -> None:
    tab.goto(url)
    tab.locator("#more summary").click()
    tab.fill("#seed", SEED)
    tab.locator("#more summary").click()
    tab.fill("#text", PROMPT)
    tab.keyboard.press("Control+Enter")
    tab.locator("body[data-answers='1']").wait_for()
    tab.locator("#live", has_text="Live").wait_for()
    tab.wait_for_timeout(1500)  # until the page has read the server's metrics


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with serving(LLM(device="cpu")) as server, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        wide: Any = {"viewport": {"width": 1180, "height": 640}, "device_scale_factor": 1.5}
        tab = browser.new_context(color_scheme="light", **wide).new_page()
        write(tab, server.url)
        drawn(tab, "light")
        tab = browser.new_context(color_scheme="dark", **wide).new_page()
        write(tab, server.url)
        tab.click("#tokens")
        tab.locator(".token").first.wait_for()
        tab.locator(".token").nth(14).focus()
        drawn(tab, "tokens")


if __name__ == "__main__":
    main()
