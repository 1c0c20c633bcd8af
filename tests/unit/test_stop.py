"""Stop strings: nothing of them leaks, whatever the split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leadline.errors import SamplingError
from leadline.text.stop import StopStrings

pytestmark = pytest.mark.unit


def expected(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule, read off the whole text: earliest end, then longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


# A small alphabet makes overlaps and near misses common.
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30)),
    st.booleans(),
)
@example("aab", ["ab"], [1, 2], False)
@example("aaab", ["aab"], [2], False)  # of the two letters held back one begins the stop string after all
@example("abababc", ["ababc"], [4], True)
@example("xaabaaab", ["aabaaa", "b"], [], True)
def test_every_split_gives_the_same(text: str, stops: list[str], cuts: list[int], include_stop: bool) -> None:
    finder = StopStrings(stops, include_stop)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    final, matched = expected(text, stops, include_stop)
    out = ""
    for a, b in pairwise(edges):
        out += finder.feed(text[a:b])
        assert final.startswith(out)
        assert finder.matched in (None, matched)
        if finder.matched is None:
            # Everything that no stop string could still claim is out already.
            held = text[len(out) : b]
            assert held == "" or any(stop.startswith(held) for stop in stops)
    assert out + finder.finish() == final
    assert finder.matched == matched


def test_after_the_match_nothing_comes() -> None:
    finder = StopStrings(["END"])
    assert finder.feed("text E") == "text "
    assert finder.feed("ND more") == ""
    assert finder.matched == "END"
    assert finder.feed("more") == finder.finish() == ""


def test_no_stops_and_empty_stop() -> None:
    assert StopStrings([]).feed("abc") == "abc"
    with pytest.raises(SamplingError, match="non-empty"):
        StopStrings(["a", ""])
