"""A headless Chromium that may reach this machine alone, for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SOFTWARE_GL = ("--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")


@dataclass
class Visit:
    """A page and what it did."""

    page: Any  # of playwright
    hosts: set[str] = field(default_factory=set)  # that it asked for something
    errors: list[str] = field(default_factory=list)  # of its scripts


@contextmanager
def visit(url: str, width: int, height: int) -> Iterator[Visit]:
    """Open `url` in a window of this size; requests to other machines fail. Skips the test without a browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: set CHROMIUM to its path")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*SOFTWARE_GL])
        page = browser.new_page(viewport={"width": width, "height": height})
        found = Visit(page)

        def check(route: Any) -> None:
            host = urlparse(route.request.url).hostname
            found.hosts.add(host)
            route.continue_() if host in ("127.0.0.1", "localhost") else route.abort()

        page.route(lambda address: address.startswith(("http:", "https:")), check)
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.goto(url)
        yield found
        browser.close()
