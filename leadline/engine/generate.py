"""The generation loop: a list of requests in, token deltas out.

Every step runs one packed batch through the model: first each decoding sequence with its next token (and drafts to
verify), then prompt chunks up to the step's token budget. Results of a sequence do not depend on the others.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from leadline.cache.pages import PAGE_TOKENS
from leadline.config.sampling import SamplingParams
from leadline.engine.model_api import Model
from leadline.engine.sampler import Logprob, Sampler, logprobs_of
from leadline.engine.speculate import Proposal, Speculation, accept, propose
from leadline.engine.text_stream import TextStream
from leadline.errors import CapacityError, LeadlineError, NumericsError, PromptError, RequestError, SamplingError
from leadline.model.step import Prefill, Run
from leadline.text.chat import hidden_ids
from leadline.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "error"]
Progress = Callable[[int, int], None]  # prompt tokens processed so far, prompt tokens of all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt. image_rows [positions inside images, D] bf16 and token_types [prompt] int64 come together."""

    token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    image_rows: Tensor | None = None
    token_types: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sequence.

    request, sample: which sequence. token_ids include the id that ended it; text does not. logprobs: per token if asked
    for. finish_reason and stop_reason (stop string or id): set in the last delta of a sequence. drafted: drafts that
    were verified for these tokens. error: why the sequence ended with finish_reason "error".
    """

    request: int
    sample: int
    token_ids: list[int]
    text: str = ""
    logprobs: list[list[Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: int = 0
    error: LeadlineError | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """One sequence from admission to its last token."""

    request: int
    sample: int
    prompt: Request
    prompt_ids: Tensor  # int64 [T]
    sampler: Sampler
    text: TextStream | None
    stop_ids: frozenset[int]
    eos_id: int
    max_tokens: int
    sequence: Any = None  # set while admitted
    anchor: int | None = None  # the newest token, sampled and not yet processed; None while the prompt is processed
    num_generated: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that the finished sequence holds; its last token is never processed."""
        return -(-(len(self.prompt_ids) + self.max_tokens - 1) // PAGE_TOKENS)


def generate(
    model: Model,
    cache: Any,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None = None,
    prefill: Prefill = "halo",
    speculation: Speculation | None = None,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Generator[Delta, None, None]:
    """Generate for all requests at once, in order of arrival as far as the cache allows.

    A sequence is admitted when a slot and the pages for its longest possible answer are free, so that it never has to
    be interrupted. Closing the iterator at any time gives back every slot and page.

    Args:
        tokenizer: without it deltas carry no text and stop strings are refused.
        speculation: draft and verify; needs a model with a drafter. The distribution of the output does not change.
        max_length: most tokens of a sequence, prompt included; at most the model's context and the free cache.
    Raises:
        PromptError, SamplingError, RequestError, CapacityError: before any work, if a request cannot be served. A
        request that fails later ends with an error delta, the others go on.
    """
    if prefill not in ("halo", "replay", "full"):
        raise RequestError(f"prefill: expected halo, replay or full, got {prefill!r}")
    if speculation is not None and not model.has_draft:
        raise RequestError("speculation: expected a model with draft stages, this one has none; switch it off")
    max_drafts = 0 if speculation is None else speculation.limit(model.config.dspark_block_size)
    free_pages = cache.pages.num_free
    context = min(model.config.max_position_embeddings, max_length or model.config.max_position_embeddings)
    jobs = [
        job
        for index, request in enumerate(requests)
        for job in _jobs(index, request, model.config, min(context, free_pages * PAGE_TOKENS), context, tokenizer)
    ]
    return _run(model, cache, jobs, prefill, speculation or Speculation(), max_drafts, free_pages, progress)


def _jobs(
    index: int,
    request: Request,
    config: Any,
    room: int,
    context: int,
    tokenizer: Tokenizer | None,
) -> Iterator[_Job]:
    params, length = request.params, len(request.token_ids)
    prompt_T = check_prompt(request.token_ids, config.vocab_size, context - 1)
    if length >= room:
        raise CapacityError(
            f"prompt {index}: {length + 1} tokens needed with the first answer token, {room} fit in the free cache; "
            "raise max_cache_tokens"
        )
    beyond = [token_id for token_id in params.stop_token_ids if token_id >= config.vocab_size]
    if beyond:
        raise SamplingError(f"stop_token_ids: expected ids below vocab_size {config.vocab_size}, got {beyond[0]}")
    if params.stop and tokenizer is None:
        raise SamplingError(f"stop: expected none without a tokenizer, got {params.stop!r}; use stop_token_ids")
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {config.eos_token_id})
    if params.min_tokens and len(stop_ids) >= config.vocab_size:
        raise SamplingError(f"min_tokens: {params.min_tokens} with every id of the vocabulary among stop_token_ids")
    seed = secrets.randbits(64) if params.seed is None else params.seed
    limit = room - length
    for sample in range(params.n):
        yield _Job(
            request=index,
            sample=sample,
            prompt=request,
            prompt_ids=prompt_T,
            sampler=Sampler(params, seed, sample, sorted(stop_ids), length + params.min_tokens),
            text=None if tokenizer is None else TextStream(tokenizer, params, hidden_ids(tokenizer)),
            stop_ids=stop_ids,
            eos_id=config.eos_token_id,
            max_tokens=limit if params.max_tokens is None else min(limit, params.max_tokens),
        )


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_tokens: int) -> Tensor:
    """The prompt as int64 [T]. Raises PromptError if it is empty, too long or holds an unknown id."""
    if not token_ids:
        raise PromptError("prompt: expected at least one token, got none")
    if len(token_ids) > max_tokens:
        raise PromptError(f"prompt: expected at most {max_tokens} tokens (the context less one), got {len(token_ids)}; "
                          "shorten it or raise max_model_len")  # fmt: skip
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise PromptError(f"prompt: expected ids 0 to {vocab_size - 1}, got {token_id!r} at position {position}")
    return torch.tensor(token_ids, dtype=torch.int64)


def _run(
    model: Model,
    cache: Any,
    jobs: list[_Job],
    prefill: Prefill,
    speculation: Speculation,
    max_drafts: int,
    free_pages: int,
    progress: Progress | None,
) -> Generator[Delta, None, None]:
    waiting, running = deque(jobs), list[_Job]()
    prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
    prefilled = 0
    try:
        while waiting or running:
            while waiting and cache.num_free_slots and waiting[0].num_pages <= free_pages:
                job = waiting.popleft()
                free_pages -= job.num_pages
                running.append(job)
                job.sequence = cache.open()
            if not running:
                raise CapacityError(
                    f"cache: {waiting[0].num_pages} pages and a slot needed, {cache.pages.num_free} pages and "
                    f"{cache.num_free_slots} slots free; another generation holds the rest, finish or close it"
                )
            for delta in _step(model, cache, running, prefill, speculation, max_drafts):
                if delta.finish_reason is not None:
                    job = next(j for j in running if (j.request, j.sample) == (delta.request, delta.sample))
                    running.remove(job)
                    job.sequence.close()
                    free_pages += job.num_pages
                yield delta
            done = prompt_tokens - sum(len(job.prompt_ids) for job in waiting)
            done -= sum(max(0, len(job.prompt_ids) - job.sequence.length) for job in running)
            if progress is not None and done != prefilled:
                prefilled = done
                progress(prefilled, prompt_tokens)
    finally:
        for job in running:
            job.sequence.close()


def _step(
    model: Model, cache: Any, running: list[_Job], prefill: Prefill, speculation: Speculation, max_drafts: int
) -> list[Delta]:
    """One step of the model for what is running. Returns the deltas of the sequences that got on."""
    deltas: list[Delta] = []
    decoding = [job for job in running if job.anchor is not None][: cache.max_step_tokens]
    proposals = _propose(model, cache, decoding, speculation, max_drafts)
    batch: list[tuple[_Job, Run, Proposal]] = []
    budget = cache.max_step_tokens
    for job, proposal in zip(decoding, proposals, strict=True):
        if isinstance(proposal, NumericsError):
            deltas.append(_failure(job, proposal))
            continue
        ids_T = torch.tensor([job.anchor, *proposal.token_ids], dtype=torch.int64)
        batch.append((job, Run(job.sequence, ids_T, job.sequence.length, len(job.prompt_ids), prefill), proposal))
        budget -= len(ids_T)
    for job in running:
        if job.anchor is None and budget > 0:
            run = _prompt_run(job, budget, prefill)
            batch.append((job, run, Proposal([], [])))
            budget -= len(run.token_ids)
    if not batch:
        return deltas
    output = model.step([run for _, run, _ in batch], cache)
    for (job, run, proposal), logits_LV in zip(batch, output.logits, strict=True):
        if not len(logits_LV):
            continue  # a prompt chunk that is not the last
        first = run.logits_from + 1  # position of the first new token
        try:
            tokens = accept(job.sampler, logits_LV, proposal, first)
        except NumericsError as error:
            deltas.append(_failure(job, error))
            continue
        job.sequence.truncate(first + len(tokens) - 1)
        deltas.append(_delta(job, tokens, logits_LV, len(proposal.token_ids)))
    return deltas


def _propose(
    model: Model, cache: Any, decoding: list[_Job], speculation: Speculation, max_drafts: int
) -> list[Proposal | NumericsError]:
    spare = (cache.max_step_tokens - len(decoding)) // max(1, len(decoding))
    # The last token of a sequence needs no processing, so one draft less than the tokens that are left.
    limits = [min(max_drafts, spare, job.max_tokens - job.num_generated - 1) for job in decoding]
    if not any(limits):
        return [Proposal([], []) for _ in decoding]
    sequences, samplers = [job.sequence for job in decoding], [job.sampler for job in decoding]
    anchors = [job.anchor for job in decoding if job.anchor is not None]
    return propose(model, cache, sequences, samplers, anchors, limits, speculation.min_confidence)


def _prompt_run(job: _Job, budget: int, prefill: Prefill) -> Run:
    """The next chunk of a prompt; only its last token's logits are wanted."""
    start, length = job.sequence.length, len(job.prompt_ids)
    end = min(length, start + budget)
    run = Run(job.sequence, job.prompt_ids[start:end], min(end, length - 1), length, prefill)
    if job.prompt.token_types is not None and job.prompt.image_rows is not None:
        is_image_T = job.prompt.token_types >= 0
        first, last = int(is_image_T[:start].sum()), int(is_image_T[:end].sum())
        run.token_types = job.prompt.token_types[start:end]
        run.image_rows = job.prompt.image_rows[first:last]
    return run


def _failure(job: _Job, error: LeadlineError) -> Delta:
    return Delta(request=job.request, sample=job.sample, token_ids=[], finish_reason="error", error=error)


def _delta(job: _Job, tokens: list[int], logits_LV: Tensor, drafted: int) -> Delta:
    """Takes over new tokens up to the one that ends the sequence, if one does."""
    text = ""
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    for count, token in enumerate(tokens, start=1):
        job.num_generated += 1
        if token in job.stop_ids:
            reason, stop_reason = "stop", None if token == job.eos_id else token
        elif job.text is not None:
            text += job.text.push(token)
            if job.text.stopped_by is not None:
                reason, stop_reason = "stop", job.text.stopped_by
        if reason is None and job.num_generated == job.max_tokens:
            reason = "length"
        if reason is not None:
            tokens = tokens[:count]
            break
    if reason is not None and job.text is not None:
        text += job.text.finish()
    job.anchor = tokens[-1]
    top = job.sampler.params.logprobs
    return Delta(
        request=job.request,
        sample=job.sample,
        token_ids=tokens,
        text=text,
        logprobs=None if top is None else logprobs_of(logits_LV[: len(tokens)], tokens, top),
        finish_reason=reason,
        stop_reason=stop_reason,
        drafted=drafted,
    )
