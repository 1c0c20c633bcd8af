"""Token ids to text as they come, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from leadline.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into text deltas.

    A token of a byte-level vocabulary may end inside a character; its bytes wait for the next token. The joined deltas
    of `feed` and `finish` equal `Tokenizer.decode` of all ids, for any split into calls. The cost of an id does not
    depend on how many came before.

    Args:
        hidden_ids: ids that give no text, such as control tokens that must not reach a reader.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters completed by these ids. Bytes that can no longer become a character give U+FFFD.

        Raises:
            PromptError: an id outside the vocabulary.
        """
        hidden, bytes_of = self._hidden_ids, self._tokenizer.token_bytes
        return self._decoder.decode(b"".join([bytes_of(i) for i in token_ids if i not in hidden]))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for the bytes of an unfinished character, else the empty text."""
        return self._decoder.decode(b"", final=True)
