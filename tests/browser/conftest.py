"""Pages in Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DOCUMENT = "http://document.test/"  # served from memory
PHONE = dict(width=360, height=740)
DESKTOP = dict(width=1180, height=800)

OpenPage = Callable[..., "playwright.Page"]


@pytest.fixture(scope="package")  # not "session": while Playwright runs, other tests cannot use asyncio.run
def browser() -> Iterator[playwright.Browser]:
    """One Chromium for all tests in the browser."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: playwright.Browser) -> Iterator[OpenPage]:
    """Open an HTML text, or the URL of an app: ``open_page(html, phone=True, dark=True)``.

    After the test, no page may have logged an error or requested anything from another host.
    """
    contexts: list[playwright.BrowserContext] = []
    problems: list[str] = []

    def open_one(
        html_or_url: str,
        *,
        phone: bool = False,
        dark: bool = False,
        reduced_motion: bool = False,
        scripts: bool = True,
    ) -> playwright.Page:
        is_url = html_or_url.startswith(("http://", "https://"))
        url = html_or_url if is_url else DOCUMENT
        context = browser.new_context(
            viewport=PHONE if phone else DESKTOP,
            java_script_enabled=scripts,
            has_touch=phone,
            is_mobile=phone,
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if reduced_motion else "no-preference",
        )
        contexts.append(context)

        def answer(route: playwright.Route) -> None:
            if is_url and urlsplit(route.request.url).netloc == urlsplit(url).netloc:
                route.continue_()
            elif route.request.url == url:
                route.fulfill(body=html_or_url, content_type="text/html; charset=utf-8")
            else:
                problems.append(f"request: {route.request.url}")
                route.abort()

        context.route("**/*", answer)
        page = context.new_page()
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.set_default_timeout(10_000)
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []
