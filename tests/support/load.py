"""A load that is hard on a server: many lengths at once, answers dropped on the way, connections cut off.

For the test-suite and for `benchmarks/soak.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any
from urllib.parse import urlsplit

import httpx

from leadline.bench.serve import Benchmark, summary
from leadline.bench.workload import Workload

_METRIC = re.compile(r"([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)")


async def storm(url: str, workload: Workload, hang_ups: int) -> dict[str, Any]:
    """The figures of `workload` against a server, while `hang_ups` other requests are cut off at some moment."""
    benchmark = Benchmark(url, workload)
    random_ = random.Random(workload.seed)
    async with asyncio.TaskGroup() as group:
        group.create_task(benchmark.run())
        for _ in range(hang_ups):
            group.create_task(_hang_up(url, random_.random(), random_.expovariate(2.0), random_.expovariate(10.0)))
    return summary(benchmark)


async def settled(url: str, seconds: float = 30.0) -> dict[str, float]:
    """The server's figures as soon as nothing runs or waits in it. Raises: TimeoutError if that takes longer."""
    async with httpx.AsyncClient() as http, asyncio.timeout(seconds):
        while True:
            figures = metrics((await http.get(f"{url}/metrics")).text)
            if not figures["vllm:num_requests_running"] and not figures["vllm:num_requests_waiting"]:
                return figures
            await asyncio.sleep(0.05)


def metrics(text: str) -> dict[str, float]:
    """Values by name from Prometheus text, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := _METRIC.match(line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


async def _hang_up(url: str, share: float, before: float, after: float) -> None:
    """Send a part of a request, or all of it, and reset the connection some seconds later.

    share: below a half that part of the body, above it the whole.
    """
    await asyncio.sleep(before)
    address = urlsplit(url)
    body = json.dumps({"prompt": "hang up " * 50, "max_tokens": 500, "stream": share > 0.75}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(head.encode() + b"\r\n\r\n" + (body if share > 0.5 else body[: int(len(body) * share)]))
    await writer.drain()
    await asyncio.sleep(after)
    writer.transport.abort()
