"""Token deltas to the documents and events of each protocol.

The three chat protocols are written by deepseek-recipe's generators; what they lack (several answers, logprobs,
reasoning under both names, counts of reasoning and images, the stop string that was met) is added to their JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import deepseek_recipe as recipe

from leadline.engine.request import Delta
from leadline.engine.sampler import Logprob
from leadline.errors import RequestError
from leadline.text.chat import MODEL_NAME, REQUESTS, ChatPrompt
from leadline.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_FINISH = {"stop": recipe.InferenceFinishReason.Stop, "length": recipe.InferenceFinishReason.Length}


class Event(NamedTuple):
    """One server-sent event: its name, if it has one, and its data."""

    name: str | None
    data: Mapping[str, Any] | str


@dataclass(slots=True)
class Usage:
    """Tokens of a request. image_tokens: prompt positions inside its images."""

    prompt: int
    images: int = 0
    image_tokens: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached,
                "images": self.images,
                "image_tokens": self.image_tokens,
            },
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class ReasoningCounter:
    """Counts the tokens of one answer before `</think>`, or before the tool marker that ends reasoning as well."""

    def __init__(self, tokenizer: Tokenizer, prompt: ChatPrompt) -> None:
        self._is_reasoning = prompt.thinking
        ends = ["</think>", "｜DSML｜"] if prompt.request.parsing_options.parse_tool_calls else ["</think>"]
        self._ends = {tokenizer.id_of(token) for token in ends}

    def split(self, token_ids: Sequence[int]) -> int:
        """How many of the next tokens are reasoning."""
        if not self._is_reasoning:
            return 0
        for count, token in enumerate(token_ids):
            if token in self._ends:
                self._is_reasoning = False
                return count
        return len(token_ids)


@dataclass(slots=True)
class _Chat:
    """One answer: its stream through deepseek-recipe, and what that does not carry."""

    processor: recipe.StreamProcessor
    response: Any
    reasoning: ReasoningCounter
    is_started: bool = False
    stop_reason: int | str | None = None
    content_logprobs: list[Any] = field(default_factory=list)
    reasoning_logprobs: list[Any] = field(default_factory=list)
    sent: tuple[int, int] = (0, 0)  # logprobs that went out with events


class _RecipeAnswers:
    """What the three chat protocols share.

    feed: the events that a delta of answer `index` completes. end: those after the last delta of the last answer.
    document: the same as one document, once all answers have ended.
    """

    def __init__(
        self, tokenizer: Tokenizer, protocol: Any, prompt: ChatPrompt, answer_id: str, model: str, usage: Usage, n: int
    ) -> None:
        self.usage = usage
        self._top_logprobs = 0
        self._tokenizer, self._model, self._id = tokenizer, model, answer_id
        self._created = int(time.time())
        request, response = REQUESTS[protocol], _RESPONSES[protocol]
        self._answers = [
            _Chat(
                prompt.processor(self._prepared(request.chunk_generator(prompt.request, answer_id, model))),
                response(answer_id, model, self._created, usage.prompt, 0),
                ReasoningCounter(tokenizer, prompt),
            )
            for _ in range(n)
        ]

    def feed(self, index: int, delta: Delta) -> list[Event]:
        answer = self._answers[index]
        chunks: list[Any] = []
        if not answer.is_started:
            answer.is_started = True
            self.usage.cached = max(self.usage.cached, delta.cached_tokens)
            counts = recipe.PromptUsage(
                prompt_tokens=self.usage.prompt, prompt_cache_hit_tokens=min(delta.cached_tokens, self.usage.prompt)
            )
            chunks += answer.processor.push(recipe.InferenceChunk.ready(prompt_usage=counts))
        reasoning = answer.reasoning.split(delta.token_ids)
        self.usage.reasoning += reasoning
        self.usage.completion += len(delta.token_ids)
        if delta.logprobs is not None:
            entries = [logprob_entry(self._tokenizer, per_token, self._top_logprobs) for per_token in delta.logprobs]
            answer.reasoning_logprobs += entries[:reasoning]
            answer.content_logprobs += entries[reasoning:]
        if delta.text or delta.token_ids:
            chunks += answer.processor.push(recipe.InferenceChunk.text(delta.text, token_count=len(delta.token_ids)))
        if delta.finish_reason is not None:
            answer.stop_reason = delta.stop_reason
            chunks += answer.processor.push(recipe.InferenceChunk.finish(_FINISH[delta.finish_reason]))
            chunks += answer.processor.finish()
        events: list[Event] = []
        for chunk in chunks:
            name, data = answer.response.sse_event_name(chunk), json.loads(chunk.to_json())
            answer.response.accumulate(chunk)
            self._add(answer, index, data)
            events.append(Event(name, data))
        return events

    def end(self) -> list[Event]:
        return []

    def document(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self._answers[0].response.to_json())
        self._add(self._answers[0], 0, data)
        return data

    def _prepared(self, generator: Any) -> Any:
        return generator

    def _add(self, answer: _Chat, index: int, data: dict[str, Any]) -> None:
        """Put what is missing into an event or document."""
        raise NotImplementedError


class ChatAnswers(_RecipeAnswers):
    """Chat Completions. include_usage: a stream ends with its usage. top_logprobs: most likely tokens asked for."""

    def __init__(self, *args: Any, include_usage: bool = False, top_logprobs: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._top_logprobs = top_logprobs
        self._include_usage = include_usage

    def end(self) -> list[Event]:
        events = [Event(None, "[DONE]")]
        if self._include_usage:
            head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
            events.insert(0, Event(None, {**head, "choices": [], "usage": self.usage.openai()}))
        return events

    def document(self) -> dict[str, Any]:
        documents = [json.loads(answer.response.to_json()) for answer in self._answers]
        choices = []
        for index, (answer, document) in enumerate(zip(self._answers, documents, strict=True)):
            answer.sent = (0, 0)
            self._add(answer, index, document)
            choices += document["choices"]
        return {**documents[0], "choices": choices, "usage": self.usage.openai()}

    def _add(self, answer: _Chat, index: int, data: dict[str, Any]) -> None:
        data["created"] = self._created
        data.pop("usage", None)
        for choice in data["choices"]:
            choice["index"] = index
            message = choice.get("delta") or choice.get("message") or {}
            if "reasoning_content" in message:
                message["reasoning"] = message["reasoning_content"]
            new = {
                "content": answer.content_logprobs[answer.sent[0] :],
                "reasoning_content": answer.reasoning_logprobs[answer.sent[1] :],
            }
            if any(new.values()):
                choice["logprobs"] = new
                answer.sent = (len(answer.content_logprobs), len(answer.reasoning_logprobs))
            if choice.get("finish_reason") is not None:
                choice["stop_reason"] = answer.stop_reason


class MessagesAnswers(_RecipeAnswers):
    """Anthropic's Messages."""

    def _add(self, answer: _Chat, index: int, data: dict[str, Any]) -> None:
        if (message := data.get("message")) is not None:  # message_start
            data = message
        outcome = data.get("delta", data)
        if outcome.get("stop_reason") == "end_turn" and isinstance(answer.stop_reason, str):
            outcome["stop_reason"], outcome["stop_sequence"] = "stop_sequence", answer.stop_reason
        if (usage := data.get("usage")) is not None:
            usage |= {"images": self.usage.images, "image_tokens": self.usage.image_tokens}
            if message is None:
                usage["output_tokens"] = self.usage.completion
                usage["reasoning_tokens"] = self.usage.reasoning


class ResponsesAnswers(_RecipeAnswers):
    """OpenAI's Responses. echo: the request's settings, which every Response repeats."""

    def __init__(self, *args: Any, echo: Mapping[str, Any], **options: Any) -> None:
        body = json.dumps({"model": MODEL_NAME, "input": "", **echo}, ensure_ascii=False)
        try:
            self._echo = recipe.ResponsesRequest(body).echo()
        except ValueError as error:  # of fields that only the response repeats
            raise RequestError(f"body: {error}") from None
        super().__init__(*args, **options)

    def _prepared(self, generator: Any) -> Any:
        return generator.with_echo(self._echo)

    def _add(self, answer: _Chat, index: int, data: dict[str, Any]) -> None:
        response = data.get("response", data)
        if "created_at" in response:
            response["created_at"] = self._created
        usage = response.get("usage")
        if usage is not None:
            usage["output_tokens"] = self.usage.completion
            usage["total_tokens"] = self.usage.prompt + self.usage.completion
            usage["input_tokens_details"] |= {"images": self.usage.images, "image_tokens": self.usage.image_tokens}
            usage["output_tokens_details"]["reasoning_tokens"] = self.usage.reasoning


class CompletionAnswers:
    """Legacy Completions. n: answers of one prompt; answer `index` belongs to prompt index // n."""

    def __init__(
        self, tokenizer: Tokenizer, answer_id: str, model: str, usage: Usage, count: int, include_usage: bool = False
    ) -> None:
        self.usage = usage
        self._tokenizer, self._include_usage = tokenizer, include_usage
        self._head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._deltas: list[list[Delta]] = [[] for _ in range(count)]
        self._lengths = [0] * count  # characters of text so far

    def feed(self, index: int, delta: Delta) -> list[Event]:
        deltas = self._deltas[index]
        if not deltas:
            self.usage.cached += delta.cached_tokens
        self.usage.completion += len(delta.token_ids)
        deltas.append(delta)
        choice = self._choice(index, [delta], self._lengths[index])
        self._lengths[index] += len(delta.text)
        return [Event(None, {**self._head, "choices": [choice]})]

    def end(self) -> list[Event]:
        events = [Event(None, "[DONE]")]
        if self._include_usage:
            events.insert(0, Event(None, {**self._head, "choices": [], "usage": self.usage.openai()}))
        return events

    def document(self) -> dict[str, Any]:
        choices = [self._choice(index, deltas, 0) for index, deltas in enumerate(self._deltas)]
        return {**self._head, "choices": choices, "usage": self.usage.openai()}

    def _choice(self, index: int, deltas: list[Delta], offset: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs(deltas, offset) if deltas[-1].logprobs is not None else None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }

    def _logprobs(self, deltas: list[Delta], offset: int) -> dict[str, Any]:
        """offset: characters of text before the first of the deltas. A token lies in the text of its delta, whatever it
        spells: marks that are hidden, and characters that only a later token completes, have none."""
        texts, values, tops, offsets = [], [], [], []
        for delta in deltas:
            place, offset = offset, offset + len(delta.text)
            for entry in delta.logprobs or ():
                # The sampled token is among them also where it is not one of the most likely, as in OpenAI's answers.
                ranked = sorted(entry, key=lambda item: item.rank)
                names = self._tokenizer.decode_each([item.token_id for item in (entry[0], *ranked)])
                tops.append({name: _finite(item.logprob) for name, item in zip(names[1:], ranked, strict=True)})
                texts.append(names[0])
                values.append(_finite(entry[0].logprob))
                offsets.append(min(place, offset))
                place += len(names[0])
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


Answers = ChatAnswers | MessagesAnswers | ResponsesAnswers | CompletionAnswers


def logprob_entry(tokenizer: Tokenizer, entries: Sequence[Logprob], top: int) -> dict[str, Any]:
    """One token in the form of Chat Completions: itself, and the `top` most likely ones, perhaps itself among them."""
    texts = tokenizer.decode_each([entry.token_id for entry in entries])
    items = [
        {"token": text, "logprob": _finite(entry.logprob), "bytes": list(tokenizer.token_bytes(entry.token_id))}
        for text, entry in zip(texts, entries, strict=True)
    ]
    ranked = sorted(zip(entries, items, strict=True), key=lambda pair: pair[0].rank)
    return {**items[0], "top_logprobs": [item for entry, item in ranked if entry.rank <= top]}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


_RESPONSES: dict[str, Any] = {
    "chat": recipe.ChatCompletionResponse,
    "messages": recipe.MessagesResponse,
    "responses": recipe.ResponsesResponse,
}
