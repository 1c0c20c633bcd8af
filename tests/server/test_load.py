"""Load on the real small model: hundreds of requests, dropped answers, cut connections; nothing may be left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from leadline.bench.workload import Workload
from leadline.cli.serve import served_model
from leadline.llm import LLM
from leadline.server.service import Service
from leadline.server.settings import ServerSettings
from leadline.testing.load import settled, storm
from leadline.testing.server_process import ServerProcess
from tests.server.serving import Running, serving

pytestmark = pytest.mark.tiny

MODEL = Path(__file__).parent.parent / "golden" / "models" / "everything"
LOAD = Workload(
    sessions=100, turns=2, shared_prefix=130, input_len=(1, 60), output_len=(1, 12), concurrency=32, cancel=0.25
)
MAX_GROWTH_MIB = 24  # of the whole process over a second load like the first one


@pytest.fixture
def small() -> Iterator[Running]:
    llm = LLM(MODEL, max_num_seqs=16, max_num_batched_tokens=256, max_cache_tokens=8192)
    model = served_model(llm)
    with serving(Service(ServerSettings(), lambda progress: model), model.engine) as running:
        yield running


def memory_mib() -> float:
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def test_200_requests_leave_nothing_behind(small: Running) -> None:
    start = small.engine.stats()
    figures = asyncio.run(storm(small.url, LOAD, hang_ups=24))
    assert figures["errors"] == {}
    assert figures["completed"] + figures["cancelled"] == 200
    assert figures["cancelled"] > 20
    assert figures["cached_share"] > 0
    asyncio.run(settled(small.url))
    after = small.engine.stats()
    assert (after.running, after.waiting, after.slots_used) == (0, 0, 0)
    # What the prefix cache keeps is all that is kept.
    assert small.engine.error is None
    assert after.numerics_errors == start.numerics_errors
    used = memory_mib()
    asyncio.run(storm(small.url, LOAD, hang_ups=24))
    asyncio.run(settled(small.url))
    assert memory_mib() - used <= MAX_GROWTH_MIB


def test_kill_9_during_a_stream_leaves_no_lock_behind(tmp_path: Path) -> None:
    arguments = (str(MODEL), "--max-cache-tokens", "4096", "--max-num-seqs", "4")
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "stream": True, "ignore_eos": True}
    first = ServerProcess(*arguments, log=tmp_path / "first.log")
    with httpx.stream("POST", f"{first.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
        first.process.kill()
        with pytest.raises(httpx.HTTPError):
            list(lines)
    first.process.wait(10)
    with ServerProcess(*arguments, log=tmp_path / "second.log", port=first.port) as second:
        answer = httpx.post(f"{second.url}/v1/completions", json=body | {"stream": False, "max_tokens": 5}, timeout=60)
        assert json.loads(answer.content)["usage"]["completion_tokens"] == 5
        assert second.stop() in (0, -signal.SIGTERM)
