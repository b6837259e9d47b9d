"""Checks of single values that a user gave; each ValueError begins with the name of the field that is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {shown(value)}")


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    """A finite number in [low, high], or (low, high] with open_low."""
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not valid or (open_low and value == low) or not math.isfinite(value):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a number in {bounds}, got {shown(value)}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")


def strings(name: str, value: Any) -> tuple[str, ...]:
    """None, one string or a list of them as a tuple of non-empty strings."""
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(s, str) and s for s in found):
        raise ValueError(f"{name} must be a non-empty string or a list of them, got {shown(value)}")
    for text in found:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds a lone surrogate, which is not Unicode text: {shown(text)}") from None
    return tuple(found)


def integers(name: str, value: Any, low: int, high: int) -> tuple[int, ...]:
    """None or a list of integers as a tuple."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{name} must be a list of integers, got {shown(value)}")
    for one in value:
        check_integer(name, one, low, high)
    return tuple(value)


def shown(value: Any) -> str:
    """A value as an error message quotes it: escaped to ASCII, and cut when long."""
    try:
        text = ascii(value)
    except ValueError:  # an integer with more digits than Python prints
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
