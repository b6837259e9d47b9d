"""A complete inference engine in one folder; start reading at llm.py."""

from .core import RequestOutput, SamplingParams
from .llm import LLM

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
