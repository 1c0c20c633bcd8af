"""A model in this process: prompts in, texts out. The surface follows vLLM's where it means the same."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from reprlib import repr as brief
from threading import Lock, get_ident
from typing import Any, Literal, NamedTuple

from leadline.cache.prefix import PrefixCache
from leadline.checkpoint.random_model import default_model_folder
from leadline.config.checks import check_integer
from leadline.config.model import ModelConfig, read_config
from leadline.config.sampling import SamplingParams
from leadline.engine.core import EngineCore
from leadline.engine.request import Delta, Progress, Request
from leadline.engine.score import score
from leadline.engine.speculate import Speculation
from leadline.errors import CheckpointError, EngineError, PromptError, RequestError, SamplingError
from leadline.model.step import Prefill
from leadline.outputs import ChatPiece, CompletionOutput, RequestOutput, ScoreOutput, by_id
from leadline.text.chat import ChatParser, ChatPrompt, Effort, ImageSource, Messages, render_chat
from leadline.text.images import content_ids, expand_images, load_image, prepare_image
from leadline.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None

_HASHED_BYTES = 1 << 26  # of a file, in blocks spread over it
_HASHED_BLOCK = 1 << 16
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str | Path | None) -> Path:
    """The folder of a model word: a folder, a hub id (downloaded on first use), or None for the small default model.

    Raises: CheckpointError if there is no such folder, or the hub does not give it.
    """
    if model is None:
        return default_model_folder()
    if not isinstance(model, str | Path):
        raise CheckpointError(f"model: expected a folder, a hub id or None, got {model!r}")
    if os.path.isdir(model):  # false, too, for a path that the system refuses
        return Path(model)
    if not _HUB_ID.fullmatch(str(model)):
        raise CheckpointError(f"model {str(model)!r}: expected a checkpoint folder or a hub id like owner/name, got "
                              "neither; check the path")  # fmt: skip
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, HFValidationError) as error:  # the hub's other errors are OSErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"model {str(model)!r}: no such folder, and the hub says: {reason}") from error


class Parts(NamedTuple):
    """A model in memory and its tokenizer."""

    model: Any
    tokenizer: Tokenizer


class LLM:
    """A loaded model with its tokenizer and engine. Threads may share it: their generations share the engine's steps.

    Args:
        model: folder, hub id, None for the small random model, or the parts of one in memory.
        weights: "dense" keeps bf16 weights in memory, "packed" the stored bytes, "auto" what fits.
        prefill: "halo" is exact, "replay" the cheaper approximation, "full" runs every layer on every prompt token.
        speculate: draft with the model's own draft stages: the same distribution, fewer steps if drafts are good.
        max_model_len: most tokens of a sequence, prompt included; None for as many as model and cache allow.
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most tokens of one step.
        max_cache_tokens: tokens that the cache holds, of running sequences and of past ones to start from.
        max_snapshots: places in past sequences from which new ones can start; 0 = every prompt starts afresh.
        host_cache_bytes: host memory for what the cache of past sequences gives up.
        max_waiting: most sequences that wait for a place; None = no bound.
    Raises: CheckpointError, ConfigError, and RequestError for an option out of range.
    """

    def __init__(
        self,
        model: str | Path | Parts | None = None,
        *,
        weights: Literal["auto", "dense", "packed"] = "auto",
        prefill: Prefill = "halo",
        speculate: bool | Speculation = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        max_cache_tokens: int = 1 << 18,
        max_snapshots: int = 64,
        host_cache_bytes: int = 0,
        max_waiting: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_integer("max_num_seqs", max_num_seqs, 1)
        check_integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        check_integer("max_cache_tokens", max_cache_tokens, 1)
        check_integer("max_snapshots", max_snapshots, 0)
        check_integer("host_cache_bytes", host_cache_bytes, 0)
        if max_waiting is not None:
            check_integer("max_waiting", max_waiting, 1)
        if not isinstance(speculate, bool | Speculation):
            raise RequestError(f"speculate: expected True, False or a Speculation, got {speculate!r}")

        def check_length(config: ModelConfig) -> None:
            if max_model_len is not None:
                check_integer("max_model_len", max_model_len, 2, config.max_position_embeddings)

        self._folder: Path | None = None
        if isinstance(model, Parts):
            self.name = "model"
            self.model, self.tokenizer = model
            check_length(self.model.config)
        else:
            self._folder = folder = resolve_model(model)
            self.name = str(model or folder.name)
            check_length(read_config(folder))  # before the weights are read, which may take long
            from leadline.model.model import Model  # here: an LLM around another model needs none of it

            self.model = Model.load(folder, weights=weights, progress=progress)
            self.tokenizer = Tokenizer.load(folder, self.model.config)
        self.config = self.model.config
        self.cache = self.model.new_cache(
            max_tokens=max_cache_tokens,
            max_sequences=max_num_seqs,
            max_step_tokens=max_num_batched_tokens,
            max_snapshots=max_snapshots,
        )
        self.engine = EngineCore(
            self.model,
            self.cache,
            tokenizer=self.tokenizer,
            prefill=prefill,
            speculation=Speculation() if speculate is True else speculate or None,
            max_length=max_model_len,
            max_snapshots=max_snapshots,
            host_bytes=host_cache_bytes,
            max_waiting=max_waiting,
        )
        self._inbox: dict[int, list[Delta]] = {}  # deltas of open generations, by ticket
        self._lock = Lock()  # of engine and inbox
        self._holder: int | None = None  # thread that has the lock
        self._lost: deque[int] = deque()  # tickets to cancel, see `_cancel_lost`

    @classmethod
    def from_parts(cls, model: Any, tokenizer: Tokenizer, **options: Any) -> LLM:
        """The same around a model in memory; `options` are the constructor's."""
        return cls(Parts(model, tokenizer), **options)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        images: Sequence[Sequence[ImageSource]] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, texts (BOS is put in front) or token ids (taken as they are, at least one).

        An empty text is BOS alone. A list of no prompts is refused: it could as well be a prompt of no ids.
        images: per prompt its images, one for each image token; a prompt without image tokens gets them at its start.
        A sequence that fails on its own ends with finish_reason "error"; the others go on.
        Raises: RequestError of some kind if any request cannot be served; nothing has run then.
        """
        requests = self.prepare(prompts, sampling_params, images=images)
        texts = [prompt if isinstance(prompt, str) else None for prompt in _listed(prompts)]
        outputs = _empty_outputs(texts, requests)
        with closing(self.run(requests, progress)) as deltas:
            for delta in deltas:
                outputs[delta.request].outputs[delta.sample].add(delta)
        return outputs

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        images: Sequence[Sequence[ImageSource]] | None = None,
        progress: Progress | None = None,
    ) -> Generator[Delta, None, None]:
        """As `generate`, step by step. Close the iterator to cancel what has not ended."""
        return self.run(self.prepare(prompts, sampling_params, images=images), progress)

    def prepare(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        images: Sequence[Sequence[ImageSource]] | None = None,
    ) -> list[Request]:
        """What `generate` does before the model runs: token ids, and images read and encoded."""
        ids = [self._token_ids(prompt) for prompt in _listed(prompts)]
        sources: Sequence[Sequence[ImageSource]] = [()] * len(ids) if images is None else images
        if not _is_list(sources) or len(sources) != len(ids) or not all(map(_is_list, sources)):
            raise PromptError(f"images: expected one list for each of {len(ids)} prompts, got {brief(images)}")
        for prompt_ids, given in zip(ids, sources, strict=True):
            if given and self.config.image_token_id not in prompt_ids:
                at = int(prompt_ids[:1] == [self.config.bos_token_id])
                prompt_ids[at:at] = [self.config.image_token_id] * len(given)
        return [self._request(*entry) for entry in zip(ids, sources, _params(sampling_params, len(ids)), strict=True)]

    def run(self, requests: list[Request], progress: Progress | None = None) -> Generator[Delta, None, None]:
        """Generate for prepared requests, step by step; `Delta.request` is the index here. Close it to cancel.

        Generations may be open at the same time; they share the engine's steps.
        Raises: as `EngineCore.add`, before anything runs.
        """
        for request in requests:
            self.engine.check(request)
        return self._run(requests, progress)

    def _run(self, requests: list[Request], progress: Progress | None) -> Generator[Delta, None, None]:
        engine, tickets = self.engine, list[int]()
        total = sum(len(request.token_ids) * request.params.n for request in requests)
        before = reported = engine.prompt_tokens_done
        try:
            with self._alone():
                tickets += (engine.add(request) for request in requests)
                self._inbox.update((ticket, []) for ticket in tickets)
            index = {ticket: i for i, ticket in enumerate(tickets)}
            left = sum(request.params.n for request in requests)
            while left:
                with self._alone():
                    if not any(self._inbox[ticket] for ticket in tickets):
                        if not any(map(engine.is_open, tickets)):
                            raise EngineError("generation: it ended with a step that was interrupted; start it again")
                        for delta in engine.step():
                            self._inbox[delta.request].append(delta)
                    deltas = [delta for ticket in tickets for delta in self._inbox[ticket]]
                    self._inbox.update((ticket, []) for ticket in tickets)
                if progress is not None and reported != engine.prompt_tokens_done:
                    reported = engine.prompt_tokens_done
                    progress(min(total, reported - before), total)
                for delta in deltas:
                    left -= delta.finish_reason is not None
                    yield replace(delta, request=index[delta.request])
        finally:
            self._lost.extend(tickets)
            self._cancel_lost()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Engine and inbox for one thread at a time. Raises: RequestError for a call that would wait for itself."""
        if self._holder == get_ident():
            raise RequestError("LLM: expected no call from inside another one (a progress function of score, a signal "
                               "handler); wait until that is done")  # fmt: skip
        try:
            with self._lock:
                try:
                    self._holder = get_ident()
                    yield
                finally:
                    self._holder = None
        finally:
            self._cancel_lost()

    def _cancel_lost(self) -> None:
        """End the requests of closed generations, now or when whoever has the lock is done.

        A generator is also closed where it is collected, and that may be anywhere: in the middle of a step, too.
        """
        while self._lost and self._lock.acquire(blocking=False):
            try:
                while self._lost:
                    self.engine.cancel(self._lost[0])
                    self._inbox.pop(self._lost.popleft(), None)
            finally:
                self._lock.release()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        thinking: bool | None = None,
        effort: Effort | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; messages, thinking, effort and tools as in `text.chat.render_chat`.

        Thinking counts as part of the answer: a small `max_tokens` may end inside it and leave `text` empty.
        Raises: as `generate`.
        """
        is_one = not _is_list(messages) or not messages or not _is_list(messages[0])
        conversations: Sequence[Any] = [messages] if is_one else messages
        outputs, pieces = self._start_chat(conversations, sampling_params, thinking, effort, tools, progress)
        with closing(pieces):
            for piece in pieces:
                outputs[piece.delta.request].outputs[piece.delta.sample].add(piece.delta, piece.parts)
        return outputs

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        effort: Effort | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
    ) -> Generator[ChatPiece, None, None]:
        """As `chat` for one conversation, step by step. Close the iterator to cancel."""
        return self._start_chat([messages], sampling_params, thinking, effort, tools, progress)[1]

    def score(self, prompts: Prompts, *, top: int = 0, progress: Progress | None = None) -> list[ScoreOutput]:
        """Log-probability of every prompt token and of the `top` most likely ones, from the full forward pass.

        Raises: as `generate`. CapacityError as well while open generations hold all of max_num_seqs or of the pages.
        """
        ids = [self._token_ids(prompt) for prompt in _listed(prompts)]
        with self._alone():
            scored = score(
                self.model,
                self.cache,
                ids,
                top=top,
                max_length=self.engine.max_length,
                prefix=self.engine.prefix,
                progress=progress,
            )
        return [
            ScoreOutput(
                prompt_token_ids=prompt_ids,
                prompt_logprobs=[None if entries is None else by_id(entries) for entries in per_token],
            )
            for prompt_ids, per_token in zip(ids, scored, strict=True)
        ]

    def save_prefixes(self, path: str | Path) -> None:
        """Write the cache of past sequences to a file, for `load_prefixes` with the same model.

        Raises: RequestError without a prefix cache, or for a model that was not loaded from a folder. CheckpointError
        if the file cannot be written.
        """
        with self._alone():
            self._prefix_cache().save(path, self._fingerprint())

    def load_prefixes(self, path: str | Path) -> None:
        """Add what `save_prefixes` wrote to the cache of past sequences, as far as there is room.

        Raises: CheckpointError if the file is missing, damaged or of another model. RequestError as `save_prefixes`.
        """
        with self._alone():
            self._prefix_cache().load(path, self._fingerprint())

    def _prefix_cache(self) -> PrefixCache:
        if self.engine.prefix is None:
            raise RequestError("prefix cache: there is none, as max_snapshots is 0; raise it")
        return self.engine.prefix

    def _fingerprint(self) -> str:
        """Of configuration and weights: all bytes of small files; of large ones times, headers and samples."""
        if self._folder is None:
            raise RequestError("prefix cache: only a model that was loaded from a folder can save it or load one")
        digest = hashlib.sha256()
        for path in sorted(p for p in self._folder.iterdir() if p.suffix in (".json", ".safetensors")):
            size, changed = path.stat().st_size, path.stat().st_mtime_ns
            digest.update(f"{path.name} {size} {changed if size > _HASHED_BYTES else 0} ".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(_HASHED_BLOCK, size * _HASHED_BLOCK // _HASHED_BYTES)):
                    file.seek(start)
                    digest.update(file.read(_HASHED_BLOCK))
        return digest.hexdigest()

    def _start_chat(
        self, conversations: Sequence[Any], params: Params, thinking: Any, effort: Any, tools: Any, progress: Any
    ) -> tuple[list[RequestOutput], Generator[ChatPiece, None, None]]:
        """The answers, still empty, and what is to be added to them. Bad requests are refused here."""
        if not isinstance(thinking, bool | None):
            raise PromptError(f"thinking: expected True, False or None, got {brief(thinking)}")
        if tools is not None and not _is_list(tools):
            raise PromptError(f"tools: expected a list of function tools, got {brief(tools)}")
        prompts = []
        for messages in conversations:
            if not _is_list(messages):
                raise PromptError(f"messages: expected a list of messages, got {brief(messages)}")
            prompts.append(render_chat(self.tokenizer, messages, thinking=thinking, effort=effort, tools=tools))
        listed = _params(params, len(prompts))
        requests = [self._request(p.token_ids, p.images, entry) for p, entry in zip(prompts, listed, strict=True)]
        outputs = _empty_outputs([prompt.text for prompt in prompts], requests)
        return outputs, _chat_pieces(prompts, self.run(requests, progress))

    def _request(self, token_ids: list[int], images: Sequence[ImageSource], params: SamplingParams) -> Request:
        if not images and self.config.image_token_id not in token_ids:
            return Request(token_ids=token_ids, params=params)
        vision = self.config.vision
        if vision is None:
            got = len(images) or f"the image token {self.config.image_token_id} in the prompt"
            raise PromptError(f"images: expected none, got {got}; this model does not read images")
        prepared = [prepare_image(load_image(source), vision) for source in images]
        ids_T, types_T = expand_images(token_ids, [image.plan for image in prepared], self.config.image_token_id)
        return Request(
            token_ids=ids_T.tolist(),
            params=params,
            image_rows=self.model.encode_images(prepared),
            token_types=types_T,
            cache_ids=content_ids(ids_T, types_T, prepared),
        )

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt, add_bos=True) if isinstance(prompt, str) else list(prompt)


def _chat_pieces(prompts: list[ChatPrompt], deltas: Generator[Delta, None, None]) -> Generator[ChatPiece, None, None]:
    parsers: dict[tuple[int, int], ChatParser] = {}
    with closing(deltas):
        for delta in deltas:
            answer = delta.request, delta.sample
            if answer not in parsers:
                parsers[answer] = prompts[delta.request].parser()
            parts = parsers[answer].feed(delta.text)
            if delta.finish_reason is not None:
                parts += parsers[answer].finish()
            yield ChatPiece(delta, parts)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list; a list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts) or not prompts:
        raise PromptError(
            f"prompts: expected a text, token ids, or a list of at least one of them, got {brief(prompts)}"
        )
    if isinstance(prompts[0], int):
        return [prompts]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise PromptError(f"prompts[{i}]: expected a text or a list of token ids, got {brief(prompt)}")
    return list(prompts)


def _params(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_list(params) or len(params) != count or not all(isinstance(entry, SamplingParams) for entry in params):
        raise SamplingError(
            f"sampling_params: expected one SamplingParams, or a list of one for each of {count} prompts, got "
            f"{brief(params)}"
        )
    return list(params)


def _empty_outputs(texts: Sequence[str | None], requests: list[Request]) -> list[RequestOutput]:
    return [
        RequestOutput(
            prompt=text,
            prompt_token_ids=list(request.token_ids),
            outputs=[CompletionOutput(index=sample) for sample in range(request.params.n)],
        )
        for text, request in zip(texts, requests, strict=True)
    ]
