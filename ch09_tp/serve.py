"""Command: serve the engine over HTTP until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from common import cli
from common.checkpoints import Checkpoint, resolve
from common.http import BoundedHead, bind
from common.trace import Tracer

from .config import EngineConfig, ServerConfig
from .core import SamplingParams
from .distributed import Place
from .frontend import Channel, Frontend
from .message import Stop
from .server import Server
from .supervisor import attend, supervise
from .tokenizer import Tokenizer


class HttpThread:
    """asyncio and uvicorn in a thread of their own; the main thread belongs to the supervisor.

    Life: start() binds and answers 503; once the engine is ready ``on_ready`` is called; drain() lets open requests
    finish until the deadline; when all is answered, or the engine has died, the engine is told to stop and the thread
    ends.
    """

    def __init__(
        self, checkpoint: Checkpoint, channel: Channel, config: ServerConfig, tracer: Tracer | None = None
    ) -> None:
        self.checkpoint, self.channel, self.config, self.tracer = checkpoint, channel, config, tracer
        self.socket, self.url = bind(config.host, config.port)
        self.on_ready: Callable[[str], None] = _announce
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Event | None = None
        self._up = threading.Event()
        self.error: Exception | None = None  # what ended the thread before its time

    def start(self) -> None:
        """Raises what kept the thread from starting."""
        self._thread.start()
        self._up.wait()
        if self.error:
            raise self.error

    def join(self) -> None:
        self._thread.join(timeout=self.config.drain_timeout + 10)

    def drain(self) -> None:
        """Accept nothing more and end; callable from any thread and from a signal handler."""
        assert self._loop is not None and self._draining is not None
        with suppress(RuntimeError):  # the loop is closed: it has ended already
            self._loop.call_soon_threadsafe(self._draining.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self.error = error
        finally:
            self._up.set()
            self.channel.put(Stop())  # the engine never outlives its interface

    async def _main(self) -> None:
        self._loop, self._draining = asyncio.get_running_loop(), asyncio.Event()
        frontend = Frontend(self.channel, Tokenizer(self.checkpoint.folder), self.config.max_queue, self.tracer)
        server = Server(frontend, self.config, self.config.served_model_name or self.checkpoint.name, self._defaults())
        settings = uvicorn.Config(server.app, log_level="warning", access_log=False, http=BoundedHead, ws="none")
        http = uvicorn.Server(settings)
        frontend.attach(self._loop)
        serving = asyncio.create_task(http.serve(sockets=[self.socket]))
        self._up.set()
        left = await self._until_the_end(frontend)
        settings.timeout_graceful_shutdown = max(2, round(left))  # for what slow clients have not read yet
        http.should_exit = True
        await serving
        server.pool.shutdown(cancel_futures=True)

    async def _until_the_end(self, frontend: Frontend) -> float:
        """Returns once the engine has died, or everything open is answered after drain(), or its deadline is over; the
        seconds that are left until then."""
        assert self._loop is not None and self._draining is not None
        draining = asyncio.create_task(self._draining.wait())
        ready = asyncio.create_task(frontend.ready.wait())
        await asyncio.wait({draining, ready}, return_when=asyncio.FIRST_COMPLETED)
        if frontend.state == "ready":
            self.on_ready(self.url)
        dead = asyncio.create_task(frontend.dead.wait())
        await asyncio.wait({draining, dead}, return_when=asyncio.FIRST_COMPLETED)
        deadline = self._loop.time() + self.config.drain_timeout
        if frontend.state != "dead":
            frontend.state = "draining"
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(frontend.idle.wait(), self.config.drain_timeout)
        frontend.fail_all("the server is shutting down")
        return deadline - self._loop.time()

    def _defaults(self) -> dict[str, float]:
        """Sampling where a request is silent: the model's generation_config, else OpenAI's temperature 1."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        found = {name: self.checkpoint.generation.get(name) for name in names}
        defaults = {"temperature": 1.0} | {name: value for name, value in found.items() if value is not None}
        try:
            SamplingParams(**defaults)
        except ValueError as error:
            raise ValueError(f"generation_config.json of {self.checkpoint.name}: {error}") from None
        return defaults


def serve(config: EngineConfig, http: HttpThread, tracer: Tracer | None = None) -> int:
    """Supervise the engine from the calling thread, which must be the main one, until a signal or the engine's death."""
    http.start()

    def on_signal(number: int, frame: object) -> None:
        if getattr(on_signal, "seen", False):
            os._exit(128 + number)  # the second signal ends at once
        on_signal.seen = True  # type: ignore[attr-defined]
        http.drain()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    error = supervise(config, http.channel, tracer)
    http.join()
    if isinstance(error, ValueError):
        raise error
    if http.error:
        raise http.error
    if error:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1 if error else 0


def main() -> int:
    parser = cli.parser(f"{__package__}.serve", "Serve this engine over an OpenAI-compatible HTTP interface.")
    cli.add_config_flags(parser, EngineConfig)
    cli.add_config_flags(parser, ServerConfig)
    args = parser.parse_args()
    config = EngineConfig(**cli.config_kwargs(EngineConfig, args))
    server_config = ServerConfig(**cli.config_kwargs(ServerConfig, args))
    if Place.of(config).rank > 0:
        return attend(config)
    return serve(config, HttpThread(resolve(config.model), Channel(), server_config))


def _announce(url: str) -> None:
    print(f"ready: {url}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run_main(main)
