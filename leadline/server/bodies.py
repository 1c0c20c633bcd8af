"""The request bodies as their schemas. The insides of messages, tools and input items are only outlined here: their
types are checked in `protocol.py`, the rest by deepseek-recipe. Fields that no schema names are ignored, unless
`refuse_unsupported` knows them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from leadline.errors import RequestError

T = TypeVar("T")

Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Object = dict[str, Any]
Many = Annotated[list[T], Field(fail_fast=True)]  # a list of a million wrong entries has one error
Content = str | Many[Object]
Stop = str | Many[str]


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class Body(Part):
    model: str | None = None


class SamplingBody(Body):
    """Sampling values under their OpenAI and vLLM names; None and absence mean the default. Fields that no schema names
    are kept for `refuse_unsupported`."""

    model_config = ConfigDict(extra="allow")  # of several bases the last one decides

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    stop_token_ids: Annotated[Many[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    stream: bool | None = None


class Kept(Part):
    """What OpenAI keeps with an answer. Nothing is kept here, so that only the types matter."""

    user: str | None = None
    store: bool | None = None
    metadata: Object | None = None


# Fields that change an answer elsewhere, or in another protocol, and not here, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "length_penalty"), (0,)),
    **dict.fromkeys(("repetition_penalty", "best_of", "n"), (1,)),
    **dict.fromkeys(("echo", "continue_final_message", "use_beam_search", "background"), (False,)),
    **dict.fromkeys(("functions", "bad_words", "mcp_servers", "stop", "stop_sequences"), ([],)),
    **dict.fromkeys(("function_call", "prediction", "web_search_options", "chat_template", "prompt_logprobs",
                     "truncate_prompt_tokens", "allowed_token_ids", "guided_json", "guided_regex", "guided_choice",
                     "guided_grammar", "structured_outputs", "max_tool_calls", "max_tokens", "max_completion_tokens",
                     "max_output_tokens", "response_format"), ()),
    "suffix": ("",), "modalities": (["text"],), "logit_bias": ({},), "top_logprobs": (0,),
}  # fmt: skip


def refuse_unsupported(body: SamplingBody) -> None:
    """Raises: RequestError for a field that would be ignored although it changes what is meant."""
    for name, value in (body.model_extra or {}).items():
        if value is not None and value not in _UNSUPPORTED.get(name, (value,)):
            neutral = "".join(f"{json.dumps(one)} or " for one in _UNSUPPORTED[name])
            raise RequestError(f"{name}: expected {neutral}nothing, as it is not supported here; got {value!r:.80}")


class StreamOptions(Part):
    include_usage: bool | None = None


class JsonSchema(Part):
    name: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"]


class ChatMessage(Part):
    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Many[Object] | None = None
    tool_call_id: str | None = None


class TemplateOptions(Part):
    thinking: bool | None = None
    enable_thinking: bool | None = None


class ToolChoice(Part):
    type: Literal["auto", "none", "required", "function", "custom", "allowed_tools"]


class MessagesToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = None


class ChatOptions(Body):
    """What makes the prompt of a chat, besides its messages."""

    tools: Many[Object] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | int | None = None
    chat_template_kwargs: TemplateOptions | None = None


class ChatBody(ChatOptions, Kept, SamplingBody):
    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    response_format: ResponseFormat | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Count | None = None
    stop: Stop | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Kept, SamplingBody):
    prompt: str | Many[str] | Many[TokenId] | Many[Many[TokenId]]
    max_tokens: Count | None = None
    n: Count | None = None
    stop: Stop | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class Reasoning(Part):
    effort: str | int | None = None


class OutputConfig(Reasoning):
    format: OutputFormat | None = None


class MessagesMessage(Part):
    role: Literal["user", "assistant", "system"]
    content: Content


class MessagesPromptBody(Body):
    """What makes the prompt of Anthropic's Messages."""

    messages: Annotated[Many[MessagesMessage], Field(min_length=1)]
    system: Content | None = None
    tools: Many[Object] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(MessagesPromptBody, SamplingBody):
    max_tokens: Count
    stop_sequences: Many[str] | None = None
    metadata: Object | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Part):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(Kept, SamplingBody):
    input: Content
    instructions: str | None = None
    tools: Many[Object] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    max_output_tokens: Count | None = None
    stop: Stop | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    include: Many[str] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None


class TokenizeBody(ChatOptions):
    """A text, or a conversation as in Chat Completions."""

    prompt: str | None = None
    messages: Annotated[Many[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: Many[TokenId]


class Problem(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every 4xx and 5xx; /v1/messages has Anthropic's form of it."""

    error: Problem
