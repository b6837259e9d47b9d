"""Command: follow one request from entry to response; --http sends it through the server."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from common import cli, commands
from common.checkpoints import resolve
from common.trace import Tracer

from .config import EngineConfig, ServerConfig
from .core import SamplingParams
from .frontend import Channel
from .llm import LLM
from .serve import HttpThread, serve


def over_http(options: dict[str, Any], tracer: Tracer, prompt: str, max_tokens: int) -> None:
    """Send one streaming request to a server of our own on a free port, and end it. Raises ValueError if it fails."""
    config = EngineConfig(**options)
    http = HttpThread(resolve(config.model), Channel(), ServerConfig(port=0), tracer)
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    failed: list[str] = []

    def client(url: str) -> None:
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False)
            if answer.status_code != 200 or 'data: {"error"' in answer.text:
                failed.append(answer.text)
        except httpx.HTTPError as error:
            failed.append(str(error))
        finally:
            http.drain()

    http.on_ready = lambda url: threading.Thread(target=client, args=(url,), daemon=True).start()
    if serve(config, http, tracer):
        failed.append("the engine has died")
    if failed:
        raise ValueError(failed[0])


if __name__ == "__main__":
    cli.run_main(lambda: commands.trace(str(__package__), LLM, SamplingParams, EngineConfig, over_http))
