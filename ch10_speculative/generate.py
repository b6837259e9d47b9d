"""Command: answer one or more prompts."""

from __future__ import annotations

from common import cli, commands

from .config import EngineConfig
from .core import SamplingParams
from .llm import LLM

if __name__ == "__main__":
    cli.run_main(lambda: commands.generate(str(__package__), LLM, SamplingParams, EngineConfig))
