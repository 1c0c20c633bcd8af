"""The page at `/` in a real browser: a conversation, the figures, a phone's width, a key, errors in words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from leadline.server import app
from tests.server.serving import fake_server

pytestmark = pytest.mark.tiny

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
TIMEOUT_MS = 20_000  # what a busy machine may take for what is expected
THOUGHT = "The user greets me. A short greeting will do."
ANSWER = "Hello! <b>How</b> can I help?\n\n你好 👋 " + "and so on " * 12
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}

expect.set_options(timeout=TIMEOUT_MS)
if CHROMIUM is None:
    pytest.skip("no chromium on this machine: install it to test the page", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def talkative(server):
    server.engine.script = f"{THOUGHT}</think>{ANSWER}"
    server.engine.step_seconds = 0.005
    return server


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens the page of a server; at the end there must have been no error on its console but the expected ones."""
    contexts, problems = [], []

    def start(server, viewport=DESK, expected=(), **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)

        def note(text):
            if not any(words in text for words in expected):
                problems.append(text)

        page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.goto(server.url)
        return page

    yield start
    for context in contexts:
        context.close()
    assert problems == []


def ask(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def figure(page, label):
    """The value of a figure, as it is written."""
    return page.locator("dl > div", has=page.locator("dt", has_text=label)).locator("dd")


def test_a_conversation(talkative, open_page, tmp_path):
    page = open_page(talkative)
    expect(page.locator("#model")).to_have_text("leadline-test")
    expect(page.locator("#state")).to_have_text("ready")
    ask(page, "Hello <i>there</i>")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.locator(".reasoning")).to_have_text(THOUGHT)
    expect(page.locator(".content")).to_contain_text(ANSWER.strip())
    expect(page.locator(".note")).to_contain_text("tokens/s")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.locator("#log i, #log b").count() == 0  # markup stays text, from both sides
    dim, plain = (page.locator(name).evaluate("e => getComputedStyle(e).color") for name in (".reasoning", ".content"))
    assert dim != plain

    ask(page, "And again")
    expect(page.locator(".content")).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    first, second = talkative.engine.requests
    assert len(second.token_ids) > len(first.token_ids) + len(ANSWER) // 8  # the answer is part of the conversation
    page.screenshot(path=tmp_path / "desk.png")

    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Hello <i>there</i>")
    expect(page.locator(".note")).to_contain_text("tokens/s")
    assert talkative.engine.requests[2].token_ids == first.token_ids


def test_stop_ends_the_answer_here_and_at_the_server(talkative, open_page):
    talkative.engine.script = "word " * 100_000
    page = open_page(talkative)
    page.get_by_label("Reasoning").uncheck()
    page.get_by_label("Most tokens").fill("")
    ask(page, "Talk")
    expect(page.locator(".content")).to_contain_text("word word word")
    assert len(talkative.engine.open_streams) == 1
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".note")).to_contain_text("stopped after")
    talkative.until(lambda: not talkative.engine.open_streams)
    ask(page, "Again")
    expect(page.locator(".content").last).to_contain_text("word word word")
    page.keyboard.press("Escape")
    expect(page.locator(".note").last).to_contain_text("stopped after")
    talkative.until(lambda: not talkative.engine.open_streams)


def test_figures_follow_the_server(talkative, open_page):
    talkative.engine.script = "word " * 100_000
    page = open_page(talkative)
    expect(figure(page, "Running")).to_contain_text("0")
    page.get_by_label("Most tokens").fill("")
    ask(page, "Talk")
    expect(figure(page, "Running")).to_contain_text("1")
    expect(figure(page, "Generation")).to_contain_text("tokens/s")
    page.wait_for_function("""() => [...document.querySelectorAll('dl > div')].some(
        box => box.textContent.startsWith('Generation') && parseInt(box.querySelector('dd').textContent) > 10)""")
    expect(figure(page, "First token")).to_contain_text(re.compile(r"\d m?s"))
    page.get_by_role("button", name="Stop").click()
    expect(figure(page, "Running")).to_contain_text("0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(talkative, open_page, tmp_path, scheme):
    page = open_page(talkative, PHONE, color_scheme=scheme)
    ask(page, "A word too long for the line: " + "x" * 200)
    expect(page.locator(".note")).to_contain_text("tokens/s")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.get_by_role("button", name="Send").is_visible()
    page.screenshot(path=tmp_path / f"phone-{scheme}.png", full_page=True)


def test_everything_is_reached_with_the_keyboard_and_has_a_name(talkative, open_page):
    page = open_page(talkative)
    expect(page.get_by_label("Message")).to_be_focused()
    names = []
    for _ in range(5):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate(
                "document.activeElement.labels?.[0]?.textContent.trim() || document.activeElement.textContent"
            )
        )
    assert names[:4] == ["Reasoning", "Most tokens", "New chat", "Send"]
    unnamed = page.evaluate("""() => [...document.querySelectorAll('input, textarea, button')].filter(
        e => !(e.labels && e.labels.length) && !e.textContent.trim()).map(e => e.id)""")
    assert unnamed == []
    assert page.evaluate("document.documentElement.lang") == "en"


def test_a_key_is_asked_for_and_used(open_page):
    refused = "status of 401"  # the browser itself notes every refusal
    with fake_server(plain=True, api_key="open sesame") as server:
        server.engine.script = "in"
        page = open_page(server, expected=[refused])
        expect(page.get_by_text("This server asks for a key.")).to_be_visible()
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#keynote")).to_contain_text("api key")
        page.get_by_label("API key").fill("open sesame")
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#model")).to_have_text("leadline-test")
        expect(page.get_by_label("API key")).to_be_hidden()
        page.get_by_label("Reasoning").uncheck()
        ask(page, "Hello")
        expect(page.locator(".content")).to_have_text("in")
        page.context.close()


def test_errors_are_told_in_words_and_the_message_is_kept(talkative, open_page):
    page = open_page(talkative, expected=["status of 429", "status of 400"])
    talkative.engine.queue_full()
    ask(page, "Hello")
    expect(page.locator(".note.error").last).to_contain_text("queue: full; try again later")
    expect(page.get_by_label("Message")).to_have_value("Hello")
    talkative.engine.refuse = None
    talkative.engine.nan_at = 3
    ask(page, "Hello")
    expect(page.locator(".note.error").last).to_contain_text("got NaN")
    talkative.engine.nan_at = None
    ask(page, "Hello")
    expect(page.locator(".content").last).to_contain_text("Hello!")


def test_a_server_that_is_gone_is_told(open_page):
    with fake_server(plain=True) as server:
        page = open_page(server, expected=["ERR_", "Failed to fetch"])
        expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#state")).to_have_text("not reachable")
    ask(page, "Hello")
    expect(page.locator(".note.error").last).to_contain_text("The server cannot be reached.")


def test_the_page_is_one_file_without_foreign_addresses():
    text = Path(app.PAGE).read_text(encoding="utf-8")
    assert "https://" not in text
    assert "src=" not in text
    assert "innerHTML" not in text


def test_a_conversation_with_the_real_engine(real, open_page, tmp_path):
    page = open_page(real)
    expect(page.locator("#state")).to_have_text("ready")
    page.get_by_label("Most tokens").fill("40")
    for count in (1, 2):
        ask(page, "How deep is the harbour, and how do you know? " * 5)
        expect(page.locator(".note")).to_have_count(count)
        expect(page.locator(".note").last).to_contain_text("tokens/s")
    expect(page.locator(".note").last).to_contain_text("prompt tokens from the cache")
    expect(figure(page, "Prefix cache hits")).to_contain_text("%")
    expect(figure(page, "Running")).to_contain_text("0")
    page.screenshot(path=tmp_path / "real.png")
