"""What `LLM` gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from leadline.engine.request import Delta, FinishReason
from leadline.engine.sampler import Logprob
from leadline.errors import LeadlineError
from leadline.text.chat import ChatDelta


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer. In a chat `text` is the content alone, beside `reasoning` and `tool_calls`.

    logprobs: per token its own entry first, then the most likely ones, if asked for. num_drafted and num_accepted:
    drafts verified, and how many of them became tokens. error: why finish_reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: list[str] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    error: LeadlineError | None = None

    def add(self, delta: Delta, parts: Sequence[ChatDelta] | None = None) -> None:
        """Join a delta of this answer to what is there; in a chat `parts` take the place of its text."""
        self.token_ids += delta.token_ids
        if parts is None:
            self.text += delta.text
        for part in parts or ():
            if part.kind == "reasoning":
                self.reasoning += part.text
            elif part.kind == "content":
                self.text += part.text
            else:
                self.tool_calls.append(part.text)
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + [by_id(entries) for entries in delta.logprobs]
        self.num_drafted += delta.drafted
        self.num_accepted += delta.accepted
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt, images expanded, and its `n` answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass(slots=True, kw_only=True)
class ScoreOutput:
    """A prompt and per token its log-probability and those of the most likely tokens; None for the first token."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None]


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """What one step added to an answer, and the same as parts of the answer."""

    delta: Delta
    parts: list[ChatDelta]


def by_id(entries: list[Logprob]) -> dict[int, Logprob]:
    """The entries of one token by id."""
    return {entry.token_id: entry for entry in entries}
