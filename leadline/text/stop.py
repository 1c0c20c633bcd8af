"""Stop strings over a stream of text deltas."""

from __future__ import annotations

from collections.abc import Iterable

from leadline.errors import SamplingError


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    Text that may turn out to be the beginning of a stop string is held back until that is decided, so nothing of a stop
    string is ever given out (unless include_stop). The stop string whose last character comes first wins; of several
    ending together, the longest. The result does not depend on how the text is split.

    Args:
        stops: stop strings, none of them empty; no stops at all passes the text through.
        include_stop: keep the stop string at the end of the text.
    Raises:
        SamplingError: an empty stop string.
    """

    def __init__(self, stops: Iterable[str], include_stop: bool = False) -> None:
        self._stops = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, delta: str) -> str:
        """Text that can be given out after this delta. Once `matched` is set, the empty text."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return delta
        text = self._held + delta
        for end, char in enumerate(delta, start=len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.advance(char)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return text[: end if self._include_stop else end - len(self.matched)]
        keep = len(text) - max(stop.length for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """One stop string as a Knuth-Morris-Pratt automaton: `length` characters of it end the text seen so far."""

    def __init__(self, text: str) -> None:
        if not text:
            raise SamplingError("stop: expected non-empty strings, got ''; leave it out")
        self.text = text
        self.length = 0
        self._shorter = [0]  # for each prefix, the next shorter prefix that also ends it
        for char in text[1:]:
            length = self._shorter[-1]
            while length and text[length] != char:
                length = self._shorter[length - 1]
            self._shorter.append(length + (text[length] == char))

    def advance(self, char: str) -> bool:
        """Take one character; True when the whole stop string ends with it."""
        while self.length and self.text[self.length] != char:
            self.length = self._shorter[self.length - 1]
        self.length += self.text[self.length] == char
        return self.length == len(self.text)
