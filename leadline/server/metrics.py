"""Prometheus figures: vLLM's names where they mean the same, `leadline:` for what only we have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)

# name, help, field of the engine's figures; a counter's exposed name gets _total behind it
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of all requests, cached ones included.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens taken from the prefix cache.", "cached_tokens"),
    ("vllm:num_preemptions", "Sequences that had to give up their pages and come back.", "preemptions"),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", "drafted"),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted"),
    ("leadline:numerics_errors", "Sequences that ended because of logits that are not numbers.", "numerics_errors"),
    ("leadline:steps", "Steps of the model.", "steps"),
    ("leadline:step_seconds", "Seconds spent in steps of the model.", "step_seconds"),
)
_GAUGES = (
    ("vllm:num_requests_running", "Sequences in the batch.", "running"),
    ("vllm:num_requests_waiting", "Sequences that wait for a slot or pages.", "waiting"),
    ("leadline:kv_pages_used", "Pages of compressed rows in use, cached prefixes included.", "kv_pages_used"),
    ("leadline:kv_pages_total", "Pages of compressed rows.", "kv_pages_total"),
    ("leadline:window_pages_used", "Pages of window rows in use, snapshots included.", "window_pages_used"),
    ("leadline:window_pages_total", "Pages of window rows.", "window_pages_total"),
    ("leadline:slots_used", "Sequence slots in use.", "slots_used"),
    ("leadline:slots_total", "Sequence slots.", "slots_total"),
    ("leadline:prefix_nodes", "Nodes of the prefix cache.", "prefix_nodes"),
    ("leadline:snapshots", "Snapshots of windows in the prefix cache.", "snapshots"),
    ("leadline:prefix_host_bytes", "Bytes of the prefix cache in host memory.", "host_bytes"),
)


class Metrics:
    """The figures of one server. stats: the engine's figures; None while there is no engine."""

    def __init__(self, model: str, stats: Callable[[], Any | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model, stats))
        self._time_to_first_token = self._histogram("vllm:time_to_first_token_seconds", "From arrival on.", _SECONDS)
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two steps that gave tokens to a sequence.", _TOKEN_SECONDS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._responses = Counter(
            "leadline:http_responses", "Responses by path and status.", ("path", "status"), registry=self._registry
        )
        self.first_token = self._time_to_first_token.labels(model).observe
        self.inter_token = self._inter_token.labels(model).observe
        self.request_end = self._e2e.labels(model).observe

    def response(self, path: str, status: int) -> None:
        self._responses.labels(path, status).inc()

    def text(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, ("model_name",), buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    def __init__(self, model: str, stats: Callable[[], Any | None]) -> None:
        self._model, self._stats = [model], stats

    def collect(self) -> Iterator[Any]:
        stats = self._stats()
        if stats is None:
            return
        for name, what, field in _COUNTERS:
            counter = CounterMetricFamily(name, what, labels=["model_name"])
            counter.add_metric(self._model, getattr(stats, field))
            yield counter
        for name, what, field in _GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=["model_name"])
            gauge.add_metric(self._model, getattr(stats, field))
            yield gauge
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the pages in use, 1 is all.", labels=["model_name"]
        )
        usage.add_metric(self._model, stats.kv_pages_used / max(1, stats.kv_pages_total))
        yield usage
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([*self._model, reason], count)
        yield finished
