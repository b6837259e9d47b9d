"""Chapters' servers side by side under the same load: started once, loaded in turn, ended together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from tqdm import tqdm

from common.load import load
from common.load_result import LoadResult
from common.service import Server
from common.workloads import Workload


def interleave_loads(
    chapters: Mapping[str, str], flags: Sequence[str], workloads: Sequence[Workload], warmup: Workload
) -> dict[str, list[LoadResult]]:
    """{name: one result per workload} for chapters {name: package}, all started with these flags.

    Only one server is loaded at a time, in the order ABBA…, so that a drift of the machine hits all alike; ``warmup``
    goes to each first, unmeasured. Raises RuntimeError if a request fails: a run with holes is no measurement.
    """
    results: dict[str, list[LoadResult]] = {name: [] for name in chapters}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Server(package, *flags)) for name, package in chapters.items()}
        for server in servers.values():
            load(server.url, warmup)
        bar = stack.enter_context(tqdm(total=len(servers) * len(workloads), desc="HTTP", file=sys.stderr, leave=False))
        for i, workload in enumerate(workloads):
            for name in list(servers) if i % 2 == 0 else reversed(servers):
                bar.set_postfix_str(f"{name} {workload.description}")
                result = load(servers[name].url, workload)
                if result.errors:
                    raise RuntimeError(f"{name}: requests failed: {result.errors}")
                results[name].append(result)
                bar.update()
    return results
