"""Token ids of one sequence to text, up to its stop string."""

from __future__ import annotations

from collections.abc import Collection

from leadline.config.sampling import SamplingParams
from leadline.text.detokenize import Detokenizer
from leadline.text.stop import StopStrings
from leadline.text.tokenizer import Tokenizer


class TextStream:
    """Text as it becomes certain: no half characters, nothing of a stop string, no control tokens.

    The first `min_tokens` tokens neither complete nor begin a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, hidden_ids: Collection[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, hidden_ids)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._protected = params.min_tokens

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """What this token makes certain."""
        text = self._detokenizer.feed([token_id])
        if self._protected > 0:
            self._protected -= 1
            return text
        return self._stops.feed(text)

    def finish(self) -> str:
        """What was held back, at the end of the sequence. Empty after a stop string."""
        return self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
