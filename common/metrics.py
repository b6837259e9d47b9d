"""Prometheus metrics of a server: the engine's counters under their own names, and latencies as the server sees them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LEVELS = ("kv_total", "kv_used", "kv_cached", "running", "waiting")  # of LLM.stats(); the other keys only grow
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One registry per server, so that several may live in one process."""

    def __init__(self, stats: Sequence[str]) -> None:
        """stats: the keys of LLM.stats()."""
        self.registry = CollectorRegistry()
        names = {name: f"minisgl_{name}" for name in stats}
        self._levels = {n: Gauge(names[n], f"engine level: {n}", registry=self.registry) for n in LEVELS}
        self._totals = {
            n: Counter(names[n], f"engine counter: {n}", registry=self.registry) for n in names if n not in LEVELS
        }
        self._last = dict.fromkeys(self._totals, 0)
        help = "prefix hits / (prefix hits + prefill tokens) since the start"
        self._hit_rate = Gauge("minisgl_prefix_hit_rate", help, registry=self.registry)
        self.open = Gauge("minisgl_open_requests", "requests accepted and not ended", registry=self.registry)
        self.ended = Counter("minisgl_requests", "requests by how they ended", ["reason"], registry=self.registry)
        self.ttft, self.itl, self.e2e = (
            Histogram(f"minisgl_{name}_seconds", help, buckets=BUCKETS, registry=self.registry)
            for name, help in (
                ("time_to_first_token", "from arrival to the first token"),
                ("inter_token_latency", "between two tokens of a request"),
                ("request_latency", "from arrival to the last token"),
            )
        )

    def take(self, stats: dict[str, int]) -> None:
        """The engine's state as of now."""
        for name, gauge in self._levels.items():
            gauge.set(stats[name])
        for name, counter in self._totals.items():
            counter.inc(stats[name] - self._last[name])
            self._last[name] = stats[name]
        hits = stats["prefix_hit_tokens"]
        self._hit_rate.set(hits / (hits + stats["prefill_tokens"]) if hits else 0.0)

    def text(self) -> bytes:
        return generate_latest(self.registry)
