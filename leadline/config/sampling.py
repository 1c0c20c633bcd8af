"""What one request asks of the sampler. Names and meanings are vLLM's where both have them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from leadline.config.checks import check_integer, check_number
from leadline.errors import SamplingError

MAX_SEQUENCES_PER_REQUEST = 128
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked on creation; any bad value raises SamplingError naming the field and the value.

    Filters apply in the order temperature, min_p, top_k, top_p, each to what the one before left.

    n: sequences to sample for the prompt, 1 to 128.
    temperature: 0 takes the most likely token (lowest id among equals) and ignores the filters.
    top_p: keep the most likely tokens until their mass reaches this share; 1 keeps all.
    top_k: keep this many tokens; 0 or -1 keep all.
    min_p: drop tokens less likely than this share of the most likely one; 0 drops none.
    seed: same seed, same sequence, whatever else runs; None draws one. Any 64-bit integer, signed or not.
    max_tokens: most tokens to generate; None goes on to the end of the context.
    min_tokens: EOS, stop ids and stop strings have no effect before so many tokens.
    stop: texts that end the answer, one or several; cut off unless `include_stop_str_in_output`.
    stop_token_ids: ids that end the answer besides EOS.
    ignore_eos: treat EOS like any other token.
    logprobs: None reports none; k reports each sampled token and the k most likely ones, from the distribution before
        temperature and filters.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 200
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value, kind in (("stop", stop, str), ("stop_token_ids", self.stop_token_ids, int)):
            if not isinstance(value, tuple | list) or any(type(item) is not kind for item in value):
                _refuse(name, f"a list of {kind.__name__}", value)
            object.__setattr__(self, name, tuple(value))
        integer = partial(check_integer, error=SamplingError)
        number = partial(check_number, error=SamplingError)
        integer("n", self.n, 1, MAX_SEQUENCES_PER_REQUEST)
        number("temperature", self.temperature)
        number("top_p", self.top_p, 0, 1, excluded=0)
        integer("top_k", self.top_k, -1)
        number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1)
        integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"at most max_tokens {self.max_tokens}", self.min_tokens)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise SamplingError(f"stop: expected at most {MAX_STOP_STRINGS} texts, got {len(self.stop)}")
        if "" in self.stop:
            _refuse("stop", "texts that are not empty", "")
        if any(token_id < 0 for token_id in self.stop_token_ids):
            _refuse("stop_token_ids", "ids of at least 0", self.stop_token_ids)
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if type(getattr(self, name)) is not bool:
                _refuse(name, "true or false", getattr(self, name))


def _refuse(name: str, expected: str, value: Any) -> NoReturn:
    raise SamplingError(f"{name}: expected {expected}, got {value!r}")
