"""Runs requests through an engine on the fake model."""

from dataclasses import replace

from leadline.engine.core import EngineCore


def generate(model, cache, requests, progress=None, **options):
    """All deltas in order; `Delta.request` is the index of the request. Bad requests are refused first."""
    core = EngineCore(model, cache, **options)
    for request in requests:
        core.check(request)
    return _deltas(core, requests, progress)


def _deltas(core, requests, progress):
    tickets = [core.add(request) for request in requests]
    try:
        while core.has_work:
            deltas = core.step()
            if progress is not None:
                progress(core.prompt_tokens_done, sum(len(request.token_ids) for request in requests))
            for delta in deltas:
                yield replace(delta, request=tickets.index(delta.request))
    finally:
        core.cancel_all()
