"""Small questions about addresses."""

from __future__ import annotations

import contextlib
import socket


def family(address: str) -> socket.AddressFamily:
    """IPv6 for an address with a colon in it, else IPv4, which names are taken for."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listens(address: str, port: int, timeout_s: float = 5.0) -> bool:
    """Whether somebody accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout_s):
        return True
    return False
