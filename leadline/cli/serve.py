"""`leadline serve`: the model over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from leadline.cache.pages import PAGE_TOKENS
from leadline.cli import options
from leadline.engine.speculate import Speculation
from leadline.engine.thread import AsyncEngine
from leadline.errors import LeadlineError
from leadline.llm import LLM
from leadline.server.run import run
from leadline.server.service import LOADER, Progress, ServedModel, Service
from leadline.server.settings import ServerSettings

_DEFAULTS = ServerSettings()


@dataclass(frozen=True, kw_only=True)
class EngineOptions(options.ModelOptions):
    """With room for many: the defaults of `LLM` are for one program."""

    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences that run together.")] = 32
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one step.")] = 512
    max_snapshots: Annotated[
        int, typer.Option(min=0, help="Places in past sequences from which new ones can start; 0: no prefix cache.")
    ] = 256
    max_waiting: Annotated[int, typer.Option(min=1, help="Most sequences that wait; more are refused (429).")] = 256


def serve(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder or hub id; nothing: the small random model.", show_default=False)
    ] = "",
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name for requests; repeat for several.", show_default="the model word")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LEADLINE_API_KEY", help="Key that requests must carry.", show_default=False)
    ] = None,
    engine: EngineOptions,
    host_cache_mib: Annotated[
        int, typer.Option(min=0, help="Host memory for what the cache of past sequences gives up.")
    ] = 0,
    cache_file: Annotated[
        Path | None,
        typer.Option(
            help="Read the cache of past sequences at the start, write it at the end. A file that is "
            "damaged or of another model is refused.",
            show_default="none",
        ),
    ] = None,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest request.")] = _DEFAULTS.max_body_bytes >> 20,
    max_images: Annotated[int, typer.Option(min=0, help="Most images of a request.")] = _DEFAULTS.max_images,
    image_urls: Annotated[
        bool, typer.Option("--image-urls/--no-image-urls", help="Fetch https images from public addresses.")
    ] = _DEFAULTS.image_urls,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=options.MAX_SECONDS, help="Seconds after which a request ends.", show_default="never"
        ),
    ] = _DEFAULTS.request_seconds,
    read_timeout: Annotated[
        float, typer.Option(min=0.1, max=options.MAX_SECONDS, help="Seconds in which a request must come whole.")
    ] = _DEFAULTS.read_seconds,
    drain_timeout: Annotated[
        float, typer.Option(min=0, max=options.MAX_SECONDS, help="Seconds for running requests when told to stop.")
    ] = _DEFAULTS.drain_seconds,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
) -> None:
    """Serve the model over HTTP. The log goes to stderr, one line a request."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if not model:
        options.note(options.RANDOM_MODEL.format("MODEL"))
    settings = ServerSettings(
        names=tuple(served_model_name or [model or "leadline"]),
        api_key=api_key,
        max_body_bytes=max_body_mib << 20,
        max_images=max_images,
        max_n=min(_DEFAULTS.max_n, engine.max_waiting),
        max_answers=engine.max_waiting,  # more could never wait together
        read_seconds=read_timeout,
        image_urls=image_urls,
        request_seconds=request_timeout,
        drain_seconds=drain_timeout,
        log_prompts=log_prompts,
    )
    if not api_key and (api_key is not None or "LEADLINE_API_KEY" in os.environ):
        raise LeadlineError("api_key: expected a key, got an empty text; leave option and variable out to need none")
    if cache_file is not None and not engine.max_snapshots:
        raise LeadlineError("cache_file: expected none with max_snapshots 0, as there is no prefix cache; raise it")
    if cache_file is not None and (cache_file.is_dir() or not cache_file.parent.is_dir()):
        raise LeadlineError(f"cache_file: expected a file in a folder that exists, got {str(cache_file)!r}")
    loaded: list[LLM] = []

    def load(progress: Progress) -> ServedModel:
        llm = LLM(
            model or None,
            **asdict(engine) | {"speculate": engine.speculate and Speculation(adaptive=True)},
            host_cache_bytes=host_cache_mib << 20,
            progress=progress,
        )
        options.choose_threads(llm.config)
        if cache_file is not None and cache_file.exists():
            llm.load_prefixes(cache_file)
        loaded.append(llm)
        # What is there now stays until the end: the collector of cycles need not go through it, 40 ms each time.
        gc.collect()
        gc.freeze()
        return served_model(llm)

    run(Service(settings, load), host, port)
    if any(thread.name == LOADER for thread in threading.enumerate()):
        os._exit(0)  # told to stop while it loads: the thread would crash in the library that it is in
    if cache_file is not None and loaded:
        loaded[0].save_prefixes(cache_file)


def served_model(llm: LLM) -> ServedModel:
    """What a server needs of a loaded model."""
    room = llm.cache.pages.num_pages * PAGE_TOKENS
    return ServedModel(
        tokenizer=llm.tokenizer,
        vision=llm.config.vision,
        encode_images=llm.model.encode_images,
        engine=AsyncEngine(llm.engine),
        max_model_len=min(llm.engine.max_length, room),
        cache_tokens=room,
    )
