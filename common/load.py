"""Load on an OpenAI-compatible server: `python -m common.load --url http://127.0.0.1:8000 --workload online`.

Open loop: each request is sent when the workload says, however slow the answers are, and every latency counts from that
moment, not from the sending. Closed loop: N clients, each sends its next request when its last answer has ended.
During the run bytes are only stamped and kept; they are read afterwards, so that the client takes little of the CPU that
the server needs. Token counts come from `usage`: the number of chunks is never taken for the number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
from tqdm import tqdm

from common import api, cli
from common.harness import save_result
from common.load_http import BrokenAnswer, LoadClient
from common.load_result import Exchange, LoadResult, outcome, print_result
from common.worker import jobs_of
from common.workloads import BUILDERS, Workload, arrivals, encode_texts, get, without_arrivals

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to send a workload. `concurrency` None is the open loop, N the closed one with N clients.

    `timeout_s` bounds one request from its sending to the end of its answer, `total_timeout_s` the whole run,
    `max_requests` their number. `model` None leaves the field out. A host other than this machine needs `allow_remote`.
    """

    concurrency: int | None = None
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 120.0
    total_timeout_s: float = 900.0
    max_requests: int = 2000
    allow_remote: bool = False

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")
        if not (0 < self.timeout_s < math.inf and 0 < self.total_timeout_s < math.inf):
            raise ValueError("timeouts must be positive and finite")

    def check(self, url: str, workload: Workload) -> None:
        """ValueError for what must not be sent."""
        if not self.allow_remote and not api.is_loopback(url):
            raise ValueError(f"{url} is not this machine; load on another host must be allowed (--allow-remote)")
        if workload.size > self.max_requests:
            raise ValueError(f"{workload.size} requests are more than the limit of {self.max_requests}")
        if workload.conversations:
            raise ValueError(
                f"{workload.name!r} has conversations: a turn needs the token ids of the answers before it"
            )


def poisson(workload: Workload, rate: float, seed: int = 0) -> Workload:
    """The same requests with Poisson arrivals at `rate` per second, the first at 0. Gaps at all rates are in proportion.

    Raises ValueError for a rate that is not positive.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"the rate must be positive, not {rate}")
    rng, clock, requests = random.Random(f"{workload.name}:arrivals:{seed}"), 0.0, []
    for request in workload.requests:
        requests.append(replace(request, arrival_s=clock))
        clock += -math.log(1.0 - rng.random()) / rate
    text = without_arrivals(workload.description) + arrivals(rate)
    return replace(workload, requests=tuple(requests), description=text)


def load(url: str, workload: Workload, **options: Any) -> LoadResult:
    """Send the workload and measure it; `options` are the fields of LoadOptions. See `run` for errors."""
    return asyncio.run(run(url, workload, LoadOptions(**options)))


async def run(
    url: str, workload: Workload, options: LoadOptions, on_end: Callable[[], None] | None = None
) -> LoadResult:
    """Send the workload to the server at `url`. A request that fails is recorded and never repeated.

    `on_end` is called when a request has ended. Raises ValueError for an address or a workload that is refused.
    """
    url = api.base_url(url)
    options.check(url, workload)
    exchanges = _exchanges(workload, options.model)
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    client = LoadClient(url, "/v1/completions", api.headers(options.api_key), clock, api.IDLE_S)
    sender = _Sender(client, clock, options.timeout_s, on_end)
    if options.concurrency is None:
        jobs = [sender.send_when_due(x) for x in exchanges]
    else:
        rest = iter(exchanges)
        jobs = [sender.send_in_turn(rest) for _ in range(options.concurrency)]
    try:
        await _within(jobs, options.total_timeout_s)
    finally:
        client.close()
    end = clock()
    for x in exchanges:
        if x.ended_s is None:
            x.ended_s = end
            x.error = f"{'cut off' if x.sent_s is not None else 'not sent'}: the run took {options.total_timeout_s:g} s"
    method = "open loop" if options.concurrency is None else f"closed loop, concurrency {options.concurrency}"
    requests = [outcome(x) for x in sorted(exchanges, key=lambda x: x.order)]
    return LoadResult(
        workload.name, f"HTTP, {method}", max((x.ended_s or 0.0 for x in exchanges), default=0.0), requests
    )


def _exchanges(workload: Workload, model: str | None) -> list[Exchange]:
    """In order of arrival; bodies are encoded here, before the clock starts."""
    fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    fixed |= {"model": model} if model else {}
    texts = [r.text for r in workload.requests]
    exchanges = []
    for job in jobs_of(workload):
        prompt = texts[job.order] if texts[job.order] is not None else job.prompt_ids
        body = json.dumps({"prompt": prompt, "max_tokens": job.max_tokens, **fixed}).encode()
        exchanges.append(Exchange(job.order, job.max_tokens, job.due_s, body))
    return sorted(exchanges, key=lambda x: (x.due_s, x.order))


async def _within(jobs: list[Coroutine[Any, Any, None]], timeout_s: float) -> None:
    """Run the coroutines side by side, for `timeout_s` at most. An exception of one, a fault of this client, is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@dataclass(frozen=True)
class _Sender:
    client: LoadClient
    clock: Clock
    timeout_s: float
    on_end: Callable[[], None] | None

    async def send_when_due(self, x: Exchange) -> None:
        await asyncio.sleep(max(0.0, x.due_s - self.clock()))
        await self._send(x)

    async def send_in_turn(self, rest: Iterator[Exchange]) -> None:
        """One client of the closed loop; all of them take from the same iterator."""
        for x in rest:
            x.due_s = self.clock()
            await self._send(x)

    async def _send(self, x: Exchange) -> None:
        x.sent_s = self.clock()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.client.post(x)
        except TimeoutError:
            x.error = f"no complete answer within {self.timeout_s:g} s"
        except (OSError, BrokenAnswer) as error:
            what = "the stream broke" if x.status is not None else "no answer"
            x.error = f"{what} ({cli.one_line(error) or type(error).__name__})"
        x.ended_s = self.clock()
        if self.on_end:
            self.on_end()


def _flags() -> cli.Parser:
    parser = cli.parser("common.load", "Send a workload to an OpenAI-compatible server and measure the answers.")
    add = parser.add_argument
    add("--url", required=True, help="address of the server, like http://127.0.0.1:8000")
    add("--workload", default="online", choices=list(BUILDERS), help="what is sent (default: online)")
    add("--scale", type=float, default=1.0, metavar="X", help="factor on the number of requests (default: 1)")
    add("--length-scale", type=float, default=1.0, metavar="X", help="factor on all lengths in tokens (default: 1)")
    add("--vocab-size", type=int, default=49152, metavar="N", help="token ids stay below this (default: 49152)")
    add("--seed", type=int, default=0, metavar="N", help="of the workload (default: 0)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rate", type=float, metavar="X", help="Poisson arrivals per second, not the workload's own")
    how.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N clients, each waits for its answer")
    add("--model", help="name of the model there (default: the first that the server lists)")
    add("--tokenizer", metavar="MODEL", help="put texts (workload edit) into the chat template of this model first")
    add("--api-key", metavar="KEY", help="sent as bearer token")
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds for one request (default: 120)")
    add("--total-timeout", type=float, default=900.0, metavar="S", help="seconds for the whole run (default: 900)")
    add("--allow-remote", action="store_true", help="allow a server on another host")
    add("--json", metavar="FILE", help="write the result with its host record")
    return parser


def main() -> int:
    """Exit status 0 if every request was answered, 1 if some failed, 2 if nothing could be sent."""
    args = _flags().parse_args()
    url = api.base_url(args.url)
    workload = get(args.workload, args.vocab_size, args.scale, args.seed, length_scale=args.length_scale)
    workload = encode_texts(workload, args.tokenizer) if args.tokenizer else workload
    workload = workload if args.rate is None else poisson(workload, args.rate, args.seed)
    options = LoadOptions(
        concurrency=args.concurrency,
        model=args.model,
        api_key=args.api_key,
        timeout_s=args.timeout,
        total_timeout_s=args.total_timeout,
        allow_remote=args.allow_remote,
    )
    options.check(url, workload)
    if args.api_key:  # a result file records the command line
        hidden = {args.api_key: "KEY", f"--api-key={args.api_key}": "--api-key=KEY"}
        sys.argv = [hidden.get(a, a) for a in sys.argv]
    with httpx.Client(headers=api.headers(args.api_key), timeout=10.0, trust_env=not api.is_loopback(url)) as client:
        listed = api.first_model(client, url)
    options = replace(options, model=args.model or listed)
    with tqdm(total=workload.size, desc=workload.name, leave=False, disable=None) as bar:
        result = asyncio.run(run(url, workload, options, bar.update))
    text = workload.description if args.concurrency is None else without_arrivals(workload.description)
    print_result(result, text)
    if args.json:
        save_result(args.json, result.to_dict() | {"description": text})
        print(f"result: {args.json}")
    return 0 if len(result.answered) == len(result.requests) else 1


if __name__ == "__main__":
    cli.run_main(main)
