"""`leadline chat`: a conversation in the terminal, or one line of a pipe after the other."""

from __future__ import annotations

import importlib
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from leadline.cli import options
from leadline.cli.options import DEFAULTS, LONG_PROMPT, for_terminal, open_llm, progress_bar
from leadline.config.sampling import SamplingParams
from leadline.errors import LeadlineError, PromptError
from leadline.llm import LLM, CompletionOutput
from leadline.text.chat import Effort
from leadline.text.images import load_image

_HELP = "/exit ends, /reset forgets all, /image PATH adds an image to the next message, Ctrl-C stops an answer"


def chat(
    model: options.Model = "",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", show_default="on where the model knows it")
    ] = None,
    effort: Annotated[str | None, typer.Option(help="Reasoning effort: low, high, max or 1 to 100.")] = None,
    weights: options.Weights = "auto",
    prefill: options.Prefill = "halo",
    speculate: options.Speculate = False,
    max_model_len: options.MaxModelLen = None,
    max_tokens: options.MaxTokens = 4096,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_p: options.TopP = DEFAULTS.top_p,
    top_k: options.TopK = DEFAULTS.top_k,
    min_p: options.MinP = DEFAULTS.min_p,
    seed: options.Seed = DEFAULTS.seed,
    stop: options.Stop = None,
) -> None:
    """Talk to the model. Reasoning is dimmed; it counts towards --max-tokens."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens or None,
        stop=stop or (),
    )
    llm = open_llm(model, weights, prefill, speculate, max_model_len)
    conversation = _Conversation(llm, params, system, thinking, _effort(effort))
    if sys.stdin.isatty():
        with suppress(ImportError):
            importlib.import_module("readline")  # gives input() line editing and history
        Console(stderr=True).print(_HELP, style="dim", highlight=False)
    while (line := _read_line()) is not None and line.strip() != "/exit":
        try:
            conversation.take(line)
        except LeadlineError as error:  # of this message: the conversation goes on without it
            Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


class _Conversation:
    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, thinking: bool | None, effort: Effort | None
    ) -> None:
        self._llm = llm
        self._params = params
        self._options: dict[str, Any] = {"thinking": thinking, "effort": effort}
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._reset()

    def take(self, line: str) -> None:
        """A command, or a message to answer."""
        command, _, argument = line.strip().partition(" ")
        if command == "/reset":
            self._reset()
        elif command == "/image":
            load_image(argument.strip())  # refuse what cannot be read now rather than with the message
            self._images.append(Path(argument.strip()))
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
        answer = CompletionOutput(index=0)
        start = time.perf_counter()
        try:
            with progress_bar("prompt", least=LONG_PROMPT) as report:
                pieces = self._llm.stream_chat(messages, self._params, progress=report, **self._options)
                with closing(pieces):
                    for piece in pieces:
                        answer.add(piece.delta, piece.parts)
                        for part in piece.parts:
                            style = "dim" if part.kind == "reasoning" else ""
                            self._console.print(Text(for_terminal(part.text), style=style), end="")
            note = "" if answer.finish_reason != "length" else ", cut at --max-tokens or the context"
        except KeyboardInterrupt:
            note = ", stopped"
        self._console.print()
        if answer.error is not None:
            raise answer.error
        self._images = []
        reply = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning}
        self._messages = [*messages, reply]
        seconds = time.perf_counter() - start
        summary = f"{len(answer.token_ids)} tokens in {seconds:.1f} s{note}"
        Console(stderr=True).print(summary, style="dim", highlight=False)


def _read_line() -> str | None:
    """The next line, None at the end of input. Ctrl-C at the prompt drops the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except KeyboardInterrupt:
            typer.echo(err=True)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise PromptError(f"stdin: expected UTF-8 text, got {error}") from None


def _effort(text: str | None) -> Effort | None:
    return int(text) if text is not None and text.isdecimal() else text  # type: ignore[return-value]
