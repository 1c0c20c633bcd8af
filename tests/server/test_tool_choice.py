"""Tool calls over HTTP on the real engine, through the official clients: as a model writes them, and as masks force
them on one that would not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import torch

from leadline.checkpoint.random_model import random_tensors
from leadline.checkpoint.source import WeightSource
from leadline.cli.serve import served_model
from leadline.config.model import ModelConfig
from leadline.llm import LLM
from leadline.model.model import Model
from leadline.server.service import Service
from leadline.server.settings import ServerSettings
from leadline.text.images import resize_plan
from tests.model.random_models import BASE
from tests.server.serving import NAME, RELEASED, Running, serving
from tests.server.test_clients import ASK, data_url
from tests.support.released_tokenizer import released_tokenizer
from tests.support.scripted_llm import scripted_llm

pytestmark = pytest.mark.tiny

D = "｜DSML｜"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["fathom", 'the "<ell>" & co', "寻 🤔"]},
        "depths": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "deep": {"type": "boolean"},
    },
    "required": ["unit", "deep"],
    "additionalProperties": False,
}
NAMES = ("sound", "mark_depth", "wait")
SCHEMAS = {"sound": SCHEMA, "mark_depth": SCHEMA, "wait": {"type": "object", "properties": {}}}
HARD = {"where": 'a < b && c > "d" \\ </ <x>\n深度思考 🤔👩‍👩‍👧', "depths": [1, 2], "deep": True}
FORMS = ("chat", "messages", "responses")


@dataclasses.dataclass
class Answer:
    """An answer in the words of no protocol. calls: names and argument texts. images: their number and tokens."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    reason: str | None
    images: tuple[int, int]


class Asker:
    """Asks the same of all protocols."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.openai = openai.OpenAI(base_url=running.url + "/v1", api_key="-", max_retries=0, timeout=60)
        self.claude = anthropic.Anthropic(base_url=running.url, api_key="-", max_retries=0, timeout=60)

    def __call__(
        self,
        form: str,
        stream: bool,
        choice: str = "auto",
        *,
        max_tokens: int = 400,
        thinking: bool = False,
        parallel: bool | None = None,
        image: str | None = None,
        **extra: Any,
    ) -> Answer:
        extra.setdefault("temperature", 1.0)
        asked = ASK if image is None else [{"role": "user", "content": image_parts(form, image)}]
        fields: dict[str, Any] = {"extra_body": extra, "model": NAME}
        if form == "messages":
            kind: dict[str, Any] = {"type": {"required": "any"}.get(choice, choice)}
            if choice not in ("auto", "none", "required"):
                kind = {"type": "tool", "name": choice}
            if parallel is not None and choice != "none":
                kind["disable_parallel_tool_use"] = not parallel
            tools = [{"name": name, "description": "d", "input_schema": SCHEMAS[name]} for name in NAMES]
            extra["thinking"] = {"type": "enabled" if thinking else "disabled"}
            return self._messages(
                stream, {**fields, "messages": asked, "tools": tools, "tool_choice": kind, "max_tokens": max_tokens}
            )
        shapes: list[Any] = [{"name": name, "description": "d", "parameters": SCHEMAS[name]} for name in NAMES]
        if parallel is not None:
            fields["parallel_tool_calls"] = parallel
        named: Any = {"name": choice}
        if form == "chat":
            extra["thinking"] = {"type": "enabled" if thinking else "disabled"}
            fields |= {"messages": asked, "max_tokens": max_tokens}
            fields["tools"] = [{"type": "function", "function": shape} for shape in shapes]
            named = {"type": "function", "function": named}
        else:
            fields |= {
                "input": "hi" if image is None else asked,
                "max_output_tokens": max_tokens,
                "tools": [{"type": "function"} | s for s in shapes],
            }
            fields["reasoning"] = {"effort": "high" if thinking else "none"}
            named |= {"type": "function"}
        fields["tool_choice"] = choice if choice in ("auto", "none", "required") else named
        return self._chat(stream, fields) if form == "chat" else self._responses(stream, fields)

    def _chat(self, stream: bool, fields: dict[str, Any]) -> Answer:
        if not stream:
            document: Any = self.openai.chat.completions.create(**fields)
            choice = document.choices[0]
            calls: list[Any] = choice.message.tool_calls or []
            return Answer(
                getattr(choice.message, "reasoning_content", None) or "",
                choice.message.content or "",
                [(call.function.name, call.function.arguments) for call in calls],
                choice.finish_reason,
                image_counts(document.usage.prompt_tokens_details),
            )
        out, found = Answer("", "", [], None, (0, 0)), dict[int, list[str]]()
        fields["stream_options"] = {"include_usage": True}
        for chunk in self.openai.chat.completions.create(**fields, stream=True):
            if chunk.usage is not None:
                out.images = image_counts(chunk.usage.prompt_tokens_details)
                continue
            part = chunk.choices[0]
            out.reasoning += getattr(part.delta, "reasoning_content", None) or ""
            out.content += part.delta.content or ""
            for piece in part.delta.tool_calls or ():
                call = found.setdefault(piece.index, ["", ""])
                call[0] += piece.function.name or ""
                call[1] += piece.function.arguments or ""
            out.reason = part.finish_reason or out.reason
        out.calls = [(name, arguments) for name, arguments in found.values()]
        return out

    def _messages(self, stream: bool, fields: dict[str, Any]) -> Answer:
        if stream:
            with self.claude.messages.stream(**fields) as events:
                message: Any = events.get_final_message()
        else:
            message = self.claude.messages.create(**fields)
        kinds: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
        for block in message.content:
            kinds[block.type].append(block)
        return Answer(
            "".join(block.thinking for block in kinds["thinking"]),
            "".join(block.text for block in kinds["text"]),
            [(block.name, json.dumps(block.input, ensure_ascii=False)) for block in kinds["tool_use"]],
            message.stop_reason,
            image_counts(message.usage),
        )

    def _responses(self, stream: bool, fields: dict[str, Any]) -> Answer:
        if not stream:
            response = self.openai.responses.create(**fields)
        else:
            texts, deltas = "", dict[int, str]()
            for event in self.openai.responses.create(**fields, stream=True):
                if event.type == "response.output_text.delta":
                    texts += event.delta
                elif event.type == "response.function_call_arguments.delta":
                    deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
            response = event.response
            assert texts == response.output_text
            whole = [item.arguments for item in response.output if item.type == "function_call"]
            assert list(deltas.values()) == [arguments for arguments in whole if arguments]
        reasoning = [item for item in response.output if item.type == "reasoning"]
        return Answer(
            "".join(part.text for item in reasoning for part in item.content or item.summary or ()),
            response.output_text,
            [(item.name, item.arguments) for item in response.output if item.type == "function_call"],
            response.status,
            image_counts(response.usage.input_tokens_details),
        )


def image_counts(usage: Any) -> tuple[int, int]:
    return usage.images, usage.image_tokens


def image_parts(form: str, url: str) -> list[dict[str, Any]]:
    """An image and a word, as a message of the protocol has them."""
    if form == "responses":
        return [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "?"}]
    if form == "chat":
        image: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    else:
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        image = {"type": "image", "source": source}
    return [image, {"type": "text", "text": "?"}]


def served(llm: LLM) -> Iterator[Asker]:
    torch.set_num_threads(1)
    model = served_model(llm)
    with serving(Service(ServerSettings(names=(NAME,)), lambda progress: model), model.engine) as running:
        asker = Asker(running)
        with asker.openai, asker.claude:
            yield asker


@pytest.fixture(scope="module")
def scripted() -> Iterator[Asker]:
    """A model that recites what `say` sets; every token that a mask forbids it to say, it draws at random."""
    llm = scripted_llm(RELEASED, "", max_cache_tokens=1 << 13)
    width = RELEASED.hidden_size
    llm.model.encode_images = lambda images: torch.zeros(
        sum(image.plan.num_tokens for image in images), width, dtype=torch.bfloat16
    )
    for asker in served(llm):
        asker.running.llm = llm  # type: ignore[attr-defined]
        yield asker


@pytest.fixture(scope="module")
def random_weights() -> Iterator[Asker]:
    """A complete small model over the released vocabulary, which knows nothing about tool calls."""
    text = BASE["text_config"] | {
        "vocab_size": RELEASED.vocab_size,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [2, 2],
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "dspark_target_layer_ids": [],
        "max_position_embeddings": 4096,
    }
    top = {key: value for key, value in BASE.items() if key != "vision_config"}
    config = ModelConfig.from_dict(top | {"text_config": text, "image_token_id": RELEASED.image_token_id})
    with torch.inference_mode():
        model = Model(config, WeightSource(random_tensors(config, 1), config, weights="dense"), None)
    yield from served(LLM.from_parts(model, released_tokenizer(config), max_num_seqs=2, max_cache_tokens=1 << 13))


def say(asker: Asker, text: str) -> list[int]:
    llm: Any = asker.running.llm  # type: ignore[attr-defined]
    llm.model.script = llm.tokenizer.encode(text)
    return list(llm.model.script)


def markup(*calls: tuple[str, dict[str, Any]]) -> str:
    lines = [f"<{D} calls>"]
    for name, arguments in calls:
        lines.append(f'<{D} invoke name="{name}">')
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            kind = str(isinstance(value, str)).lower()
            lines.append(f'<{D} parameter name="{key}" string="{kind}">{text}</{D} parameter>')
        lines += [*([] if arguments else [""]), f"</{D} invoke>"]
    return "\n\n" + "\n".join([*lines, f"</{D} calls>"])


def loaded(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


CALLED = {"chat": "tool_calls", "messages": "tool_use", "responses": "completed"}
CUT = {"chat": "length", "messages": "max_tokens", "responses": "incomplete"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_that_complete(scripted: Asker, form: str, calls: int) -> None:
    wanted = [("sound", HARD), ("wait", {})][:calls]
    say(scripted, "why</think>so" + markup(*wanted))
    whole, streamed = (scripted(form, stream, thinking=True) for stream in (False, True))
    assert whole == streamed
    assert (whole.reasoning, whole.content, loaded(whole.calls)) == ("why", "so", wanted)
    assert whole.reason == CALLED[form]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_cut_by_max_tokens(scripted: Asker, form: str) -> None:
    """Wherever the budget ends: a stream says what the document says, and that it was cut."""
    ids = say(scripted, "so" + markup(("sound", HARD), ("wait", {})))
    for most in range(1, len(ids), 7):
        whole, streamed = (scripted(form, stream, max_tokens=most, temperature=0) for stream in (False, True))
        if form == "messages":  # half an object is {} there, and its client guesses what a stream would have become
            whole.calls, streamed.calls = ([(name, "") for name, _ in answer.calls] for answer in (whole, streamed))
        assert whole == streamed, most
        assert whole.reason == CUT[form]
        assert all("DSML" not in text for text in (whole.content, *(text for _, text in whole.calls)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("thinking", [False, True])
def test_a_required_call_comes_whatever_the_model_would_say(scripted: Asker, form: str, thinking: bool) -> None:
    say(scripted, "</think>".join(["why"] * thinking + ["I would rather not."]))
    for stream in (False, True):
        answer = scripted(form, stream, "mark_depth", thinking=thinking)
        assert (answer.reasoning, answer.content) == ("why" if thinking else "", "")
        ((name, arguments),) = loaded(answer.calls)
        assert name == "mark_depth"
        assert {"unit", "deep"} <= arguments.keys() <= SCHEMA["properties"].keys()
        assert answer.reason == CALLED[form]


@pytest.mark.parametrize("form", FORMS)
def test_a_required_call_about_an_image(scripted: Asker, form: str) -> None:
    assert RELEASED.vision is not None
    tokens = resize_plan(120, 90, RELEASED.vision).num_tokens

    def calls(choice: str, text: str) -> list[tuple[str, Any]]:
        say(scripted, text)
        whole, streamed = (scripted(form, stream, choice, image=data_url(120, 90), seed=2) for stream in (False, True))
        assert whole == streamed
        assert (whole.content, whole.reason, whole.images) == ("", CALLED[form], (1, tokens))
        return loaded(whole.calls)

    willing = [("mark_depth", {"unit": "fathom", "deep": True}), ("wait", {})]
    assert calls("required", markup(*willing)) == willing
    ((name, arguments),) = calls("mark_depth", "A lead line.")
    assert name == "mark_depth"
    assert {"unit", "deep"} <= arguments.keys()


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_namespaces_are_forced(scripted: Asker, stream: bool) -> None:
    def function(name: str, **parameter: Any) -> Any:
        schema = {"type": "object", "properties": {"p": parameter}, "required": ["p"], "additionalProperties": False}
        return {"type": "function", "name": name, "parameters": schema}

    def calls(choice: Any, **fields: Any) -> list[tuple[str | None, str, Any]]:
        asked: Any = {"model": NAME, "input": "hi", "tools": tools, "tool_choice": choice, **fields}
        asked["reasoning"] = {"effort": "none"}
        response: Any
        if stream:
            events: list[Any] = list(scripted.openai.responses.create(**asked, stream=True))
            response = events[-1].response
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert done == response.output
        else:
            response = scripted.openai.responses.create(**asked)
        return [(item.namespace, item.name, json.loads(item.arguments)) for item in response.output]

    lead = {"type": "namespace", "name": "lead", "description": "The lead line."}
    log = {"type": "namespace", "name": "log", "description": "The log line."}
    tools: list[Any] = [
        {**lead, "tools": [function("read", enum=["fathom"]), function("heave", type="null")]},
        {**log, "tools": [function("read", enum=["knot"])]},
        function("read", enum=["mile"]),
    ]
    possible = [("lead", "read", "fathom"), ("lead", "heave", None), ("log", "read", "knot"), (None, "read", "mile")]
    for namespace, name, value in possible:
        whole = name if namespace is None else f"{namespace}::{name}"
        say(scripted, "No.")
        for choice in ({"name": whole}, {"name": name, "namespace": namespace}):
            assert calls({"type": "function", **choice}) == [(namespace, name, {"p": value})]
        ((space, found, arguments),) = calls("required", parallel_tool_calls=False)
        assert (space, found, arguments["p"]) in possible
    say(scripted, markup(("log::read", {"p": "knot"}), ("lead::heave", {"p": None})))
    assert calls("required") == [("log", "read", {"p": "knot"}), ("lead", "heave", {"p": None})]
    with pytest.raises(openai.BadRequestError, match=r"lead::read.*got 'heave'"):
        calls({"type": "function", "name": "heave"})


@pytest.mark.parametrize("form", FORMS)
def test_what_follows_the_rules_is_left_alone(scripted: Asker, form: str) -> None:
    first = {"where": "x < y & '深' ", "unit": "寻 🤔", "depths": [1, 2], "deep": True}
    calls = [("sound", first), ("wait", {})]
    say(scripted, markup(*calls))
    assert loaded(scripted(form, False, "required").calls) == calls
    assert loaded(scripted(form, False, "required", parallel=True).calls) == calls
    assert loaded(scripted(form, True, "required", parallel=False).calls) == calls[:1]
    assert loaded(scripted(form, True, "sound").calls) == calls[:1]


@pytest.mark.parametrize("form", FORMS)
def test_none_calls_nothing(scripted: Asker, form: str) -> None:
    text = "so" + markup(("wait", {}))
    say(scripted, text)
    for stream in (False, True):
        answer = scripted(form, stream, "none")
        assert (answer.content, answer.calls) == (text, [])


def test_some_tools_are_allowed(scripted: Asker) -> None:
    say(scripted, "no")
    entries = [{"type": "function", "function": {"name": "wait"}}]
    chat = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": entries}}
    answer = scripted("chat", False, tool_choice=chat)
    assert {name for name, _ in answer.calls} == {"wait"}
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]}
    answer = scripted("responses", True, tool_choice=flat)
    assert {name for name, _ in answer.calls} == {"wait"}


@pytest.mark.parametrize("stream", [False, True])
def test_json_or_calls(scripted: Asker, stream: bool) -> None:
    """A format for answers does not forbid calls, and calls do not switch it off."""
    schema = {"type": "object", "properties": {"fathoms": {"type": "integer"}}, "required": ["fathoms"]}
    chat = {"response_format": {"type": "json_schema", "json_schema": {"name": "depth", "schema": schema}}}
    responses = {"text": {"format": {"type": "json_schema", "name": "depth", "schema": schema}}}
    messages = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    for form, extra in zip(FORMS, (chat, messages, responses), strict=True):
        say(scripted, markup(("wait", {})))
        assert scripted(form, stream, **extra).calls == [("wait", "{}")]
        say(scripted, '{"fathoms": 7}')
        answer = scripted(form, stream, **extra)
        assert (answer.content, answer.calls) == ('{"fathoms": 7}', [])
        say(scripted, '{"fathoms": true}')
        assert "true" not in scripted(form, stream, **extra).content


@pytest.mark.parametrize(("seed", "form"), list(enumerate(FORMS)))
def test_random_weights_call_under_the_mask(random_weights: Asker, seed: int, form: str) -> None:
    """Each protocol with draws of its own: what a draw becomes under the mask is no affair of the protocol."""
    for choice in ("required", "sound"):
        answer = random_weights(form, False, choice, parallel=False, seed=seed)
        assert answer == random_weights(form, True, choice, parallel=False, seed=seed)
        ((name, arguments),) = loaded(answer.calls)
        assert name in (NAMES if choice == "required" else ("sound",))
        if name != "wait":
            assert arguments["unit"] in SCHEMA["properties"]["unit"]["enum"]
            assert type(arguments["deep"]) is bool
            assert len(arguments.get("where", "")) <= 12
            assert all(0 <= depth <= 99 for depth in arguments.get("depths", []))
        assert (answer.content, answer.reason) == ("", CALLED[form])
