"""`leadline chat`: a conversation in the terminal, or one line of a pipe after the other.

The model runs in this process, or with `--url` in a server; the conversation is the same.
"""

from __future__ import annotations

import importlib
import io
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from leadline.cli.answers import ModelAnswers, ServerAnswers
from leadline.cli.options import (
    LONG_PROMPT,
    ApiKey,
    MaxTokens,
    ModelOptions,
    SamplingOptions,
    Url,
    for_terminal,
    note,
    open_llm,
    progress_bar,
)
from leadline.errors import LeadlineError, PromptError
from leadline.text.chat import effort_number

_HELP = "/exit ends, /reset forgets all, /image PATH adds an image to the next message, Ctrl-C stops an answer"


def chat(
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Checkpoint folder or hub id; empty: the small random model. With --url: the name there.",
        ),
    ] = "",
    url: Url = "",
    api_key: ApiKey = "",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", show_default="on where the model knows it")
    ] = None,
    effort: Annotated[
        str | None, typer.Option(help="Reasoning effort: minimal, low, medium, high, xhigh, max, or 1 to 100.")
    ] = None,
    model_options: ModelOptions,
    max_tokens: MaxTokens = 4096,
    sampling: SamplingOptions,
) -> None:
    """Talk to the model. Reasoning is dimmed; it counts towards --max-tokens."""
    params = sampling.params(max_tokens)
    strength = int(effort) if effort is not None and effort.isdecimal() else effort
    effort_number(strength, thinking=True)  # type: ignore[arg-type]  # refused now rather than with the first message
    source: ModelAnswers | ServerAnswers
    if url:
        if model_options != ModelOptions():
            raise typer.BadParameter(
                "--weights, --prefill, --speculate, --max-model-len and --max-cache-tokens are the server's to choose"
            )
        source = ServerAnswers(url, params, api_key=api_key, model=model, thinking=thinking, effort=strength)
        note(f"{source.model} at {url}")
    else:
        source = ModelAnswers(open_llm(model, model_options), params, thinking=thinking, effort=strength)
    if not _at_terminal() and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # some locales let broken text through
    conversation = _Conversation(source, system)
    if _at_terminal():
        with suppress(ImportError):
            importlib.import_module("readline")  # gives input() line editing and history
        note(_HELP)
    while True:
        try:
            line = _read_line()
            if line is None or line.strip() == "/exit":
                return
            try:
                conversation.take(line)
            except LeadlineError as error:  # of this message: the conversation goes on without it
                if not _at_terminal():
                    raise  # a script must see it, and later lines may lean on this one
                note(f"error: {error}", style="red")
        except KeyboardInterrupt:  # at the prompt, or just before or behind an answer: drops the line, never the chat
            typer.echo(err=True)


class _Conversation:
    def __init__(self, source: ModelAnswers | ServerAnswers, system: str | None) -> None:
        self._source = source
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._reset()

    def take(self, line: str) -> None:
        """A command, or a message to answer."""
        command, _, argument = line.strip().partition(" ")
        if command == "/reset":
            self._reset()
        elif command == "/image":
            if not argument.strip():
                raise PromptError("/image: expected a path behind it, as in /image photo.png")
            self._images.append(_readable_image(argument.strip()))
        elif command.startswith("/") and "/" not in command[1:]:
            raise PromptError(f"{command}: no such command; {_HELP}")
        elif line.strip():
            self._answer(line.strip())

    def _reset(self) -> None:
        self._messages: list[dict[str, Any]] = list(self._start)
        self._images: list[Path] = []

    def _answer(self, text: str) -> None:
        """Ask and show. An answer stopped by Ctrl-C stays in the conversation as far as it came."""
        parts: list[dict[str, Any]] = [{"type": "image", "image": path} for path in self._images]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        messages = [*self._messages, {"role": "user", "content": content}]
        said = reasoned = ""
        num_tokens, how = 0, ""
        start = time.perf_counter()
        try:
            with (
                progress_bar("prompt", least=LONG_PROMPT) as report,
                closing(self._source.answer(messages, report)) as pieces,
            ):
                for piece in pieces:
                    reasoned += piece.reasoning
                    said += piece.content
                    num_tokens += piece.num_tokens
                    self._show(piece.reasoning, "dim")
                    self._show(piece.content, "")
                    if piece.error is not None:
                        raise piece.error
                    how = ", cut at --max-tokens or the context" if piece.finish_reason == "length" else ""
        except KeyboardInterrupt:
            how = ", stopped"
        finally:
            self._console.print()
        self._images = []
        self._messages = [*messages, {"role": "assistant", "content": said, "reasoning_content": reasoned}]
        made = f"{num_tokens} tokens in " if num_tokens else ""  # a server does not count an answer that was stopped
        note(f"{made}{time.perf_counter() - start:.1f} s{how}")

    def _show(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(for_terminal(text), style=style), end="")


def _readable_image(name: str) -> Path:
    """The path of an image; one that cannot be read is refused now rather than with the message."""
    from leadline.text.images import load_image  # here: it imports torch

    load_image(name)
    return Path(name)


def _read_line() -> str | None:
    """The next line, None at the end of input."""
    try:
        return input("> " if _at_terminal() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise PromptError(f"stdin: expected UTF-8 text, got {error}") from None


def _at_terminal() -> bool:
    return sys.stdin.isatty()
