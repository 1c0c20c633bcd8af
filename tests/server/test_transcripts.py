"""Tool transcripts, written down as a model writes them, well-formed and not, and replayed through all protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.serving import Running
from tests.server.test_tool_choice import FORMS, Asker, loaded

pytestmark = pytest.mark.unit

D = "｜DSML｜"
# name: the answer behind <think>; what is read of it: reasoning, content, calls
TRANSCRIPTS: dict[str, tuple[str, tuple[str, str, list[tuple[str, Any]]]]] = {
    "one call": (
        f"""Depth first.</think>Sounding now.

<{D} calls>
<{D} invoke name="sound">
<{D} parameter name="where" string="true">bow & "stern" <port></{D} parameter>
<{D} parameter name="depths" string="false">[1, 2.5, null]</{D} parameter>
</{D} invoke>
</{D} calls>""",
        ("Depth first.", "Sounding now.", [("sound", {"where": 'bow & "stern" <port>', "depths": [1, 2.5, None]})]),
    ),
    "two calls, one without arguments": (
        f"""</think>

<{D} calls>
<{D} invoke name="wait">

</{D} invoke>
<{D} invoke name="mark_depth">
<{D} parameter name="unit" string="true">寻 🤔
second line </</{D} parameter>
</{D} invoke>
</{D} calls>""",
        ("", "", [("wait", {}), ("mark_depth", {"unit": "寻 🤔\nsecond line </"})]),
    ),
    "a call inside the reasoning": (
        f"""I should wait.

<{D} calls>
<{D} invoke name="wait">

</{D} invoke>
</{D} calls>""",
        ("I should wait.", "", [("wait", {})]),
    ),
    "words behind the block": (
        f"""</think>

<{D} calls>
<{D} invoke name="wait">

</{D} invoke>
</{D} calls>

That is all.""",
        ("", "", [("wait", {})]),
    ),
    "no call after all": (
        "Nothing to do.</think>if a < b && c > d: done",
        ("Nothing to do.", "if a < b && c > d: done", []),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_f44_transcripts_are_read_alike_everywhere(server: Running, form: str, name: str) -> None:
    text, (reasoning, content, calls) = TRANSCRIPTS[name]
    asker = Asker(server)
    server.engine.script = text
    with asker.openai, asker.claude:
        for stream in (False, True):
            answer = asker(form, stream, thinking=True)
            assert (answer.reasoning, answer.content, loaded(answer.calls)) == (reasoning, content, calls)
    marks = server.engine.tokenizer.encode(text).count(server.engine.tokenizer.id_of(D))
    assert marks == text.count(D)
    assert json.dumps(calls).count("DSML") == 0
