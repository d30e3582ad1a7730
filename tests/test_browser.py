"""The browser of the tests sees what a user and a screen reader see, and hears every complaint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, needs_chromium

pytestmark = needs_chromium()

PAGE = """<!doctype html><meta name="viewport" content="width=device-width"><title>page</title>
<style>body { height: 3000px } @media (prefers-color-scheme: dark) { body { background: #000 } }
#tip { display: none } #mark:hover + #tip { display: block }</style>
<button id="one" aria-label="first button" onclick="this.dataset.pressed = 1">1</button>
<a id="two" href="#x">second</a> <input id="three" aria-label="third">
<div id="mark" style="width: 40px; height: 40px; margin-top: 1500px">mark</div><div id="tip">tip</div>"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(800, 600) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    (tmp_path / "page.html").write_text(PAGE, encoding="utf-8")
    browser.open((tmp_path / "page.html").as_uri())
    return browser


def test_a_quiet_page_has_no_problems(page: Browser) -> None:
    assert page.script("document.title") == "page"
    assert page.problems() == []


@pytest.mark.parametrize(
    ("code", "heard"),
    [
        ("console.error('broken', 7)", "console.error: broken 7"),
        ("setTimeout(() => { throw new Error('thrown') })", "Error: thrown"),
        ("document.body.append(Object.assign(new Image(), {src: 'http://example.com/x.png'}))", "ERR_"),
        ("document.body.append(Object.assign(new Image(), {src: 'no-such-file.png'}))", "ERR_FILE_NOT_FOUND"),
    ],
)
def test_every_complaint_is_heard(page: Browser, code: str, heard: str) -> None:
    page.script(f"{code}; new Promise(done => setTimeout(done, 300))")
    assert any(heard in problem for problem in page.problems())


def test_an_expression_that_throws_is_an_error_here(page: Browser) -> None:
    with pytest.raises(RuntimeError, match="nothing is not defined"):
        page.script("nothing.at.all")


def test_keys_move_the_focus_and_press(page: Browser) -> None:
    page.key("Tab")
    assert page.focused() == "button: first button"
    page.key("Enter")
    assert page.script("document.querySelector('#one').dataset.pressed") == "1"
    page.key("Tab")
    assert page.focused() == "link: second"
    page.key("Tab")
    page.write("typed")
    assert page.script("document.querySelector('#three').value") == "typed"
    page.key("Tab", shift=True)
    assert page.focused() == "link: second"


def test_hovering_scrolls_there_and_shows(page: Browser) -> None:
    shown = "getComputedStyle(document.querySelector('#tip')).display"
    assert page.script(shown) == "none"
    page.hover("#mark")
    assert page.script(shown) == "block"


def test_media_size_and_pictures(page: Browser, tmp_path: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.media(prefers_color_scheme="dark")
    assert page.script(ground) == "rgb(0, 0, 0)"
    page.media(prefers_color_scheme="light")
    assert page.script(ground) == "rgba(0, 0, 0, 0)"
    page.resize(390, 844, scale=2, mobile=True)
    assert page.script("innerWidth") == 390
    page.picture(tmp_path / "window.png")
    page.picture(tmp_path / "whole.png", whole=True)
    page.resize(800, 600)
    assert _size(tmp_path / "window.png") == (780, 1688)
    assert _size(tmp_path / "whole.png")[1] >= 2 * 3000


def _size(png: Path) -> tuple[int, int]:
    """Width and height from the file's first chunk."""
    raw = png.read_bytes()
    return int.from_bytes(raw[16:20], "big"), int.from_bytes(raw[20:24], "big")
