"""The engine: requests in, token deltas out, one packed step of the model at a time.

`EngineCore` owns the cache, the prefix cache and everything about a running sequence; the scheduler says who gets what,
the model does it. Nothing here waits or knows of threads: `LLM` calls `step` in a loop, a server from one thread.
What a sequence becomes depends on its own request alone. Batch, chunks, prefix hits, preemption and drafts only decide
when its tokens are computed.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leadline.cache.pages import PAGE_TOKENS
from leadline.cache.prefix import PrefixCache
from leadline.engine.model_api import Model, StepOutput
from leadline.engine.request import Delta, FinishReason, Request, check_prompt
from leadline.engine.room import Job, Room
from leadline.engine.sampler import Sampler, logprobs_of
from leadline.engine.scheduler import Scheduler, StepPlan
from leadline.engine.speculate import DraftBudget, Proposal, Speculation, StepRows, accept, accept_all, propose
from leadline.engine.text_stream import TextStream
from leadline.errors import CapacityError, EngineError, LeadlineError, NumericsError, RequestError, SamplingError
from leadline.model.step import PREFILL_MODES, Prefill, Run
from leadline.text.chat import hidden_ids
from leadline.text.tokenizer import Tokenizer

logger = logging.getLogger("leadline.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Figures of the engine at one moment. Tokens, steps and finished sequences count from the start."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    numerics_errors: int = 0
    drafted: int = 0
    accepted: int = 0
    kv_pages_used: int = 0  # pages that only the prefix cache holds are not in use
    kv_pages_total: int = 0
    window_pages_used: int = 0
    window_pages_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    prefix_nodes: int = 0
    snapshots: int = 0
    host_bytes: int = 0
    steps: int = 0
    step_seconds: float = 0.0


class EngineCore:
    """Runs requests on a model and a cache of its own.

    Args:
        tokenizer: without it deltas carry no text, and stop strings and grammars are refused.
        prefill: of all prompts.
        speculation: draft and verify; needs a model with a drafter. The distribution of the output does not change.
        max_length: most tokens of a sequence, prompt included; at most the model's context and the cache.
        max_snapshots: window snapshots of the prefix cache, for which `cache` has to have room; 0 = no prefix cache.
        host_bytes: host memory for what the prefix cache evicts.
        max_waiting: most sequences that wait; None = no bound.
    Raises:
        RequestError: an unknown prefill mode, or speculation that the model cannot do.
    """

    def __init__(
        self,
        model: Model,
        cache: Any,
        *,
        tokenizer: Tokenizer | None = None,
        prefill: Prefill = "halo",
        speculation: Speculation | None = None,
        max_length: int | None = None,
        max_snapshots: int = 0,
        host_bytes: int = 0,
        max_waiting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if prefill not in PREFILL_MODES:
            raise RequestError(f"prefill: expected one of {', '.join(PREFILL_MODES)}, got {prefill!r}")
        if speculation is not None and not model.has_draft:
            raise RequestError("speculation: expected a model with draft stages, this one has none; switch it off")
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.prefill: Prefill = prefill
        self.speculation = speculation or Speculation()
        self.max_drafts = 0 if speculation is None else speculation.limit(model.config.dspark_block_size)
        context = model.config.max_position_embeddings
        self.max_length = min(context, max_length or context)
        self.prefix: PrefixCache | None = None
        if max_snapshots > 0:
            self.prefix = PrefixCache(cache, max_snapshots=max_snapshots, host_bytes=host_bytes, mode=prefill)
        # A seeded request verifies all its drafts or none: the budget of a step must not decide.
        self._exact_drafts = (
            self.max_drafts if cache.max_sequences * (1 + self.max_drafts) <= cache.max_step_tokens else 0
        )
        self._clock = clock
        self._room = Room(cache, self.prefix, prefill)
        self._scheduler: Scheduler[Job] = Scheduler(
            self._room, max_step_tokens=cache.max_step_tokens, max_waiting=max_waiting
        )
        self._draft_budget = DraftBudget()
        self._tickets = itertools.count()
        self._arrivals = itertools.count()
        self._jobs: dict[int, list[Job]] = {}  # unfinished sequences by ticket
        self._hidden = frozenset[int]() if tokenizer is None else hidden_ids(tokenizer)
        self._think_id = tokenizer.id_of("<think>") if tokenizer is not None and tokenizer.has_control_tokens else None
        self._count: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._step_seconds = 0.0

    # Requests ---------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Take a request in. Its deltas carry the ticket that is returned.

        Raises: PromptError, SamplingError, RequestError: it cannot be served. CapacityError: it would not fit even
        alone. QueueFullError: too many wait. Nothing has happened then.
        """
        ticket = next(self._tickets)
        jobs = self._make_jobs(ticket, request)
        self._scheduler.check_room(len(jobs))
        for job in jobs:
            self._scheduler.add(job)
        self._jobs[ticket] = jobs
        return ticket

    def check(self, request: Request) -> None:
        """Raises what `add` would raise for a request that cannot be served at any time."""
        self._make_jobs(-1, request)

    def cancel(self, ticket: int) -> None:
        """End all sequences of a request, without a delta. Unknown and ended tickets are ignored."""
        for job in list(self._jobs.get(ticket, ())):
            self._room.close(job)
            self._end(job, "cancelled")

    def is_open(self, ticket: int) -> bool:
        """Whether a request still has sequences that have not ended."""
        return ticket in self._jobs

    def cancel_all(self) -> None:
        """End everything."""
        for ticket in list(self._jobs):
            self.cancel(ticket)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def prompt_tokens_done(self) -> int:
        """Prompt tokens processed or taken from the prefix cache since the start."""
        return self._count["prompt_tokens"] + self._room.cached_tokens

    def _make_jobs(self, ticket: int, request: Request) -> list[Job]:
        params, config = request.params, self.model.config
        room = min(self.max_length, self.cache.pages.num_pages * PAGE_TOKENS)
        check_prompt(request.token_ids, config.vocab_size, self.max_length - 1)
        length = len(request.token_ids)
        if length >= room:
            raise CapacityError(
                f"prompt: {length + 1} tokens needed with the first answer token, {room} fit in the cache; "
                "raise max_cache_tokens"
            )
        self._check_params(request)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {config.eos_token_id})
        if params.min_tokens and len(stop_ids) >= config.vocab_size:
            raise SamplingError(f"min_tokens: {params.min_tokens} with every id of the vocabulary among stop_token_ids")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        now = self._clock()
        limit = room - length
        in_reasoning = request.token_ids[-1] == self._think_id
        # Images of one size have the same token ids: without ids of their content nobody can tell them apart.
        use_cache = request.use_cache and self.prefix is not None
        use_cache &= request.token_types is None or request.cache_ids is not None
        jobs: list[Job] = []
        for sample in range(params.n):
            jobs.append(
                Job(
                    arrival=next(self._arrivals),
                    target=length,
                    priority=request.priority,
                    deadline=None if request.timeout is None else now + request.timeout,
                    leader=jobs[0] if jobs and use_cache else None,
                    use_cache=use_cache,
                    is_exact=params.temperature > 0 and params.seed is not None,
                    ticket=ticket,
                    sample=sample,
                    request=request,
                    prompt_length=length,
                    token_ids=array("q", request.token_ids),
                    cache_ids=array("q", request.token_ids if request.cache_ids is None else request.cache_ids),
                    sampler=Sampler(params, seed, sample, sorted(stop_ids), length + params.min_tokens),
                    text=None if self.tokenizer is None else TextStream(self.tokenizer, params, self._hidden),
                    matcher=None if request.grammar is None else request.grammar.matcher(in_reasoning),
                    stop_ids=stop_ids,
                    eos_id=config.eos_token_id,
                    max_tokens=limit if params.max_tokens is None else min(limit, params.max_tokens),
                )
            )
        return jobs

    def _check_params(self, request: Request) -> None:
        params, vocab_size = request.params, self.model.config.vocab_size
        beyond = [token_id for token_id in params.stop_token_ids if token_id >= vocab_size]
        if beyond:
            raise SamplingError(f"stop_token_ids: expected ids below vocab_size {vocab_size}, got {beyond[0]}")
        if params.stop and self.tokenizer is None:
            raise SamplingError(f"stop: expected none without a tokenizer, got {params.stop!r}; use stop_token_ids")
        if request.grammar is not None and params.min_tokens:
            raise SamplingError(
                f"min_tokens: expected 0 with a grammar, got {params.min_tokens}: a complete document may only end"
            )
        rows, width = request.image_rows, self.model.config.hidden_size
        if rows is not None and rows.shape[1] != width:
            raise RequestError(f"image_rows: expected [n, {width}], as wide as the model, got {list(rows.shape)}")

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One step for what is in line. Returns the deltas of the sequences that got on or ended.

        A sequence that fails on its own, or runs past its deadline, ends with a delta that says why; if the model
        itself fails, so do all sequences of the step. An interrupt (Ctrl-C) ends them without a delta.
        """
        start = self._clock()
        for job in self._scheduler.running:
            if self.max_drafts:
                job.drafts = self._wanted_drafts(job)
        deltas = [self._expired(job) for job in self._scheduler.expire(start)]
        plan = self._scheduler.schedule()
        if not plan.decode and not plan.prefill:
            if not self._scheduler.running and self._scheduler.waiting:
                deltas.append(self._failed(self._scheduler.waiting[0], self._no_room()))
            return deltas
        try:
            batch = self._propose(plan, deltas)
            batch += [(job, self._prompt_run(job, count), Proposal([], [])) for job, count in plan.prefill]
            if not batch:
                return deltas
            output = self.model.step([run for _, run, _ in batch], self.cache)
            drawn = self._draw(batch, output)
            for (job, run, proposal), logits_LV, tokens in zip(batch, output.logits, drawn, strict=True):
                self._count["prompt_tokens"] += max(0, min(job.prompt_length, run.sequence.length) - job.computed)
                if tokens is None:
                    job.computed = job.sequence.length
                    self._room.remember(job)
                else:
                    deltas.append(self._take(job, run, tokens, logits_LV, proposal))
        except Exception as error:
            deltas += self._step_failed(plan, error)
            return deltas
        except BaseException:  # an interrupt; how far the step came, for whom, is not known
            for job in plan.jobs:
                self._room.close(job, keep=False)
                self._end(job, "cancelled")
            raise
        seconds = self._clock() - start
        self._step_seconds += seconds
        self._count["steps"] += 1
        self._draft_budget.observe(sum(len(run.token_ids) for _, run, _ in batch), seconds)
        return deltas

    def _wanted_drafts(self, job: Job) -> int:
        if job.matcher is not None and not job.matcher.is_free:
            return 0  # hardly a draft would fit the grammar
        # The last token of a sequence needs no processing, so one draft less than the tokens that are left.
        left = job.max_tokens - job.num_generated - 1
        return max(0, min(self._exact_drafts if job.is_exact else self.max_drafts, left))

    def _propose(self, plan: StepPlan[Job], deltas: list[Delta]) -> list[tuple[Job, Run, Proposal]]:
        """Runs of the decoding sequences, with their drafts."""
        jobs, limits = [job for job, _ in plan.decode], [drafts for _, drafts in plan.decode]
        proposals: list[Proposal | NumericsError] = [Proposal([], []) for _ in jobs]
        if any(limits):
            drafting = [i for i, limit in enumerate(limits) if limit]
            made = propose(
                self.model,
                self.cache,
                [jobs[i].sequence for i in drafting],
                [jobs[i].sampler for i in drafting],
                [jobs[i].token_ids[-1] for i in drafting],
                [limits[i] for i in drafting],
                self.speculation.min_confidence,
            )
            for i, proposal in zip(drafting, made, strict=True):
                proposals[i] = proposal
            if self.speculation.adaptive:
                self._cut_drafts(jobs, proposals, len(jobs) + sum(count for _, count in plan.prefill))
        good: list[tuple[Job, Proposal]] = []
        for job, proposal in zip(jobs, proposals, strict=True):
            if isinstance(proposal, NumericsError):
                deltas.append(self._failed(job, proposal))
            else:
                good.append((job, proposal))
        ids = [[job.token_ids[-1], *proposal.token_ids] for job, proposal in good]
        flat_T = torch.tensor(list(itertools.chain.from_iterable(ids)), dtype=torch.int64)
        batch = []
        for (job, proposal), ids_T in zip(good, torch.split(flat_T, [len(each) for each in ids]), strict=True):
            length = job.sequence.length
            batch.append((job, Run(job.sequence, ids_T, length, length, self.prefill), proposal))
        return batch

    def _cut_drafts(self, jobs: list[Job], proposals: list[Proposal | NumericsError], num_tokens: int) -> None:
        open_ones = [p for j, p in zip(jobs, proposals, strict=True) if isinstance(p, Proposal) and not j.is_exact]
        lengths = self._draft_budget.lengths([p.chances for p in open_ones], num_tokens)
        for proposal, length in zip(open_ones, lengths, strict=True):
            proposal.keep(length)

    def _prompt_run(self, job: Job, count: int) -> Run:
        """The next tokens of a prompt; only the last prompt token's logits are wanted, and only for the first time."""
        start, known = job.sequence.length, job.target
        if self.prefill == "replay":
            known = job.prompt_length
        logits_from = known - 1 if not job.num_generated else job.target
        ids_T = torch.frombuffer(job.token_ids[start : start + count], dtype=torch.int64)
        run = Run(job.sequence, ids_T, logits_from, known, self.prefill, keep_from=job.keep_from)
        types_T, rows = job.request.token_types, job.request.image_rows
        if types_T is not None and rows is not None and start < job.prompt_length:
            is_image_T = types_T >= 0
            first, last = int(is_image_T[:start].sum()), int(is_image_T[: start + count].sum())
            beyond = max(0, start + count - job.prompt_length)  # answer tokens after a preemption
            run.token_types = torch.nn.functional.pad(types_T[start : start + count], (0, beyond), value=-1)
            run.image_rows = rows[first:last]
        return run

    def _draw(self, batch: list[tuple[Job, Run, Proposal]], output: StepOutput) -> list[list[int] | Exception | None]:
        """New tokens, or why there are none, of every run whose logits were wanted."""
        counts = [len(logits_LV) for logits_LV in output.logits]
        if not any(counts):
            return [None] * len(batch)
        rows, acceptances, first = StepRows(output.rows), [], 0
        for (job, run, proposal), count in zip(batch, counts, strict=True):
            if count:
                acceptances.append(accept(job.sampler, rows, first, proposal, run.logits_from + 1, job.matcher))
                first += count
        drawn = iter(accept_all(rows, acceptances))
        return [next(drawn) if count else None for count in counts]

    def _take(self, job: Job, run: Run, tokens: list[int] | Exception, logits_LV: Tensor, proposal: Proposal) -> Delta:
        """Takes over what a step found for a sequence: one token, or the accepted drafts and one token."""
        position = run.logits_from + 1
        try:
            if isinstance(tokens, Exception):
                raise tokens
            delta = self._delta(job, tokens, logits_LV, len(proposal.token_ids))
        except Exception as error:
            return self._failed(job, _typed(error))
        job.sequence.truncate(position + len(delta.token_ids) - 1)
        self._count["generation_tokens"] += len(delta.token_ids)
        self._count["drafted"] += len(proposal.token_ids)
        self._count["accepted"] += len(tokens) - 1
        was_prompt = job.computed < job.target
        job.computed = job.sequence.length
        if delta.finish_reason is not None:
            self._room.close(job)
            self._end(job, delta.finish_reason)
        elif was_prompt:
            self._room.remember(job)
        return delta

    def _delta(self, job: Job, tokens: list[int], logits_LV: Tensor, drafted: int) -> Delta:
        """Takes over new tokens up to the one that ends the sequence, if one does."""
        text = ""
        reason: FinishReason | None = None
        stop_reason: int | str | None = None
        generated, accepted = job.num_generated, len(tokens) - 1
        for count, token in enumerate(tokens, start=1):
            if token in job.stop_ids:
                reason, stop_reason = "stop", None if token == job.eos_id else token
            elif job.text is not None:
                text += job.text.push(token)
                if job.text.stopped_by is not None:
                    reason, stop_reason = "stop", job.text.stopped_by
            if reason is None and generated + count == job.max_tokens:
                reason = "length"
            if reason is not None:
                tokens = tokens[:count]
                break
        if reason is not None and job.text is not None:
            text += job.text.finish()
        job.token_ids.extend(tokens)
        job.cache_ids.extend(tokens)
        top = job.request.params.logprobs
        return Delta(
            request=job.ticket,
            sample=job.sample,
            token_ids=tokens,
            text=text,
            logprobs=None if top is None else logprobs_of(logits_LV[: len(tokens)], tokens, top),
            finish_reason=reason,
            stop_reason=stop_reason,
            drafted=drafted,
            accepted=min(accepted, len(tokens)),
            cached_tokens=job.cached_tokens or 0,
        )

    # Ends -------------------------------------------------------------------------------------------------------------

    def _expired(self, job: Job) -> Delta:
        self._room.close(job)
        self._end(job, "timeout")
        error = EngineError(f"timeout: the request took longer than {job.request.timeout} s; raise its timeout")
        return self._last_delta(job, "timeout", error)

    def _failed(self, job: Job, error: LeadlineError) -> Delta:
        """End a sequence whose rows may be broken: nothing of it may serve others."""
        if isinstance(error, NumericsError):
            self._count["numerics_errors"] += 1
            if self.prefix is not None:
                self.prefix.clear()  # its prompt chunks are in there already
        self._room.close(job, keep=False)
        self._end(job, "error")
        return self._last_delta(job, "error", error)

    def _no_room(self) -> CapacityError:
        cache = self.cache
        return CapacityError(
            f"cache: {self._room.num_available} of {cache.pages.num_pages} pages and {cache.num_free_slots} of "
            f"{cache.max_sequences} slots can be had, too few for the next sequence although none runs; whoever uses "
            "this cache beside the engine holds the rest"
        )

    def _step_failed(self, plan: StepPlan[Job], error: Exception) -> list[Delta]:
        if self.prefix is not None:
            self.prefix.clear()
        error = _typed(error)
        return [self._failed(job, error) for job in plan.jobs]

    def _last_delta(self, job: Job, reason: FinishReason, error: LeadlineError) -> Delta:
        text = "" if job.text is None else job.text.finish()
        return Delta(
            request=job.ticket,
            sample=job.sample,
            token_ids=[],
            text=text,
            finish_reason=reason,
            cached_tokens=job.cached_tokens or 0,
            error=error,
        )

    def _end(self, job: Job, reason: FinishReason) -> None:
        self._scheduler.remove(job)
        self._finished[reason] += 1
        jobs = self._jobs[job.ticket]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.ticket]

    # Figures ----------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        cache, prefix, count = self.cache, self.prefix, self._count
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            prompt_tokens=self.prompt_tokens_done,
            cached_tokens=self._room.cached_tokens,
            generation_tokens=count["generation_tokens"],
            preemptions=self._scheduler.num_preemptions,
            finished=dict(self._finished),
            numerics_errors=count["numerics_errors"],
            drafted=count["drafted"],
            accepted=count["accepted"],
            kv_pages_used=cache.pages.num_pages - self._room.num_available,
            kv_pages_total=cache.pages.num_pages,
            window_pages_used=0 if prefix is None else cache.window_pages.num_pages - prefix.windows.num_available,
            window_pages_total=0 if prefix is None else cache.window_pages.num_pages,
            slots_used=cache.max_sequences - cache.num_free_slots,
            slots_total=cache.max_sequences,
            prefix_nodes=0 if prefix is None else prefix.num_nodes,
            snapshots=0 if prefix is None else prefix.num_snapshots,
            host_bytes=0 if prefix is None else prefix.host.used,
            steps=count["steps"],
            step_seconds=self._step_seconds,
        )


def _typed(error: Exception) -> LeadlineError:
    """What requests are told of a failure."""
    if isinstance(error, LeadlineError):
        return error
    logger.error("step failed", exc_info=error)
    return EngineError(f"step: it failed with {type(error).__name__}: {error}; see the log")
