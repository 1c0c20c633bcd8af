"""`leadline generate`: continue a text, from the command line, a file or a pipe."""

from __future__ import annotations

import json as json_format
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from leadline.cli.options import (
    DEFAULTS,
    LONG_PROMPT,
    MaxTokens,
    ModelOptions,
    SamplingOptions,
    for_terminal,
    note,
    open_llm,
    progress_bar,
)
from leadline.errors import PromptError
from leadline.llm import LLM
from leadline.outputs import CompletionOutput


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads stdin.", show_default=False)] = None,
    *,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text from a file.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Image put in front of the text; repeat for several.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Checkpoint folder or hub id; empty: the small random model.")
    ] = "",
    model_options: ModelOptions,
    max_tokens: MaxTokens = DEFAULTS.max_tokens or 0,
    min_tokens: Annotated[int, typer.Option(help="No end before so many tokens.")] = DEFAULTS.min_tokens,
    sampling: SamplingOptions,
    n: Annotated[int, typer.Option("--n", help="Answers to sample.")] = DEFAULTS.n,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(min=0, help="Id that ends the answer; repeat for several.")
    ] = None,
    include_stop: Annotated[bool, typer.Option(help="Keep the stop text in the answer.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Treat the end token like any other.")] = DEFAULTS.ignore_eos,
    logprobs: Annotated[int | None, typer.Option(help="With --json: report so many likely tokens.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of streaming text.")] = False,
) -> None:
    """Continue a text. The answer goes to stdout, everything else to stderr."""
    params = sampling.params(
        max_tokens,
        n=n,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_id or (),
        include_stop_str_in_output=include_stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    text = _read(prompt, file)
    llm = open_llm(model, model_options)
    (request,) = llm.prepare(text, params, images=[image or ()])
    answers = [CompletionOutput(index=index) for index in range(n)]
    is_streaming = not json and n == 1
    start = first = last = time.perf_counter()
    with progress_bar("prompt", least=LONG_PROMPT) as report, closing(llm.run([request], report)) as deltas:
        try:
            for delta in deltas:
                last = time.perf_counter()
                first = last if first == start else first
                answers[delta.sample].add(delta)
                if is_streaming:
                    typer.echo(for_terminal(delta.text), nl=False)
        finally:
            if is_streaming:
                typer.echo()
    statistics = _statistics(len(request.token_ids), answers, first - start, last - first)
    if json:
        document = {
            "model": llm.name,
            "prompt": text,
            "prompt_token_ids": list(request.token_ids),
            "answers": [_answer(llm, answer) for answer in answers],
            "statistics": statistics,
        }
        typer.echo(json_format.dumps(document, ensure_ascii=False))
    elif not is_streaming:
        for answer in answers:
            typer.echo(f"--- answer {answer.index + 1}\n{for_terminal(answer.text)}")
    note(_line(statistics))
    for answer in answers:
        if answer.error is not None:
            raise answer.error


def _read(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise PromptError("prompt: expected a text, - for stdin, or --file, and only one of them")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        if prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file or 'stdin'}: expected readable UTF-8 text, got {error}") from None
    assert prompt is not None
    return prompt


def _statistics(
    prompt_tokens: int, answers: list[CompletionOutput], prefill_s: float, decode_s: float
) -> dict[str, Any]:
    """Counts and seconds. The first token of each answer belongs to the prompt's time, the rest to decoding."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tokens_per_s": max(0, tokens - len(answers)) / decode_s if decode_s > 0 else None,
        "drafts": sum(answer.num_drafted for answer in answers),
        "drafts_accepted": sum(answer.num_accepted for answer in answers),
    }


def _line(statistics: dict[str, Any]) -> str:
    """One line for people: tokens, seconds, tokens per second, accepted drafts."""
    s = statistics
    line = f"{s['prompt_tokens']} prompt tokens in {s['prefill_s']:.2f} s, {s['completion_tokens']} tokens"
    if s["tokens_per_s"] is not None:
        line += f" in {s['decode_s']:.2f} s, {s['tokens_per_s']:.1f} tokens/s"
    if s["drafts"]:
        line += f", {s['drafts_accepted']} of {s['drafts']} drafts accepted"
    return line


def _answer(llm: LLM, answer: CompletionOutput) -> dict[str, Any]:
    entry = {name: getattr(answer, name) for name in ("index", "text", "token_ids", "finish_reason", "stop_reason")}
    if answer.logprobs is not None:
        entry["logprobs"] = [
            [
                {"token_id": i, "token": llm.tokenizer.token_of(i), "logprob": item.logprob, "rank": item.rank}
                for i, item in entries.items()
            ]
            for entries in answer.logprobs
        ]
    if answer.error is not None:
        entry["error"] = str(answer.error)
    return entry
