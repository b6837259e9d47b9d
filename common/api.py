"""What the clients of an OpenAI-compatible server share: addresses, the event stream, and errors in one line."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.cli import one_line

DONE = "[DONE]"
TEXT_LIMIT = 300
# Below what servers grant an idle connection (uvicorn: 5 s): a request must not meet the closing of its connection.
IDLE_S = 2.0


class ApiError(ValueError):
    """The server is away, or its answer is an error; the message is one line. `status` is None without an answer."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def base_url(text: str) -> str:
    """The address without a trailing slash and without `/v1`. ValueError unless it is http or https with a host."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"not an address: {text!r} ({one_line(error)})") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"expected an address like http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether the host is this machine by its very address: `localhost`, 127.0.0.0/8 or ::1. No name is looked up."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request. Compression is declined: it would hold tokens back."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key must be printable ASCII")
    key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"Accept-Encoding": "identity", "Content-Type": "application/json", **key}


@dataclass
class Events:
    """Cuts the bytes of a server-sent event stream into the data of its events, however the network cut them."""

    _rest: bytes = b""
    _data: list[str] = field(default_factory=list)

    def feed(self, part: bytes) -> list[str]:
        """The data of the events that `part` completes. Comments and fields other than `data` are skipped."""
        out = []
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                out.append("\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode(errors="replace"))
        return out


def decode(data: str) -> dict[str, Any]:
    """The JSON object of one event. Raises ApiError if it is none, and with the server's words if it is an error."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ApiError(f"the stream holds no JSON object: {_shorten(data)}")
    if event.get("error"):
        raise ApiError(_message(event) or _shorten(data))
    return event


def choice_of(event: dict[str, Any]) -> tuple[str, str | None]:
    """Text and finish_reason of the first choice of a chunk, of a completion or of a chat; ("", None) without one.

    Raises ApiError where a choice has another form.
    """
    if not event.get("choices"):
        return "", None
    try:
        choice = event["choices"][0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        return text, choice.get("finish_reason")
    except (LookupError, AttributeError, TypeError):
        raise ApiError(f"a chunk is not understood: {_shorten(json.dumps(event))}") from None


def error_of(status: int, body: bytes) -> str:
    """`STATUS: message` in one line, from OpenAI's JSON form, from another one, or from plain text."""
    text = body.decode(errors="replace")
    try:
        message = _message(json.loads(text))
    except ValueError:
        message = None
    reason = httpx.codes.get_reason_phrase(status) or "unknown status"
    return f"{status}: {message or _shorten(text) or reason}"


def away(url: str, error: httpx.HTTPError) -> ApiError:
    """The error for a request that got no answer."""
    what = one_line(error) or type(error).__name__
    return ApiError(f"no server answers at {url} ({what})")


def _message(data: Any) -> str | None:
    if not isinstance(data, dict):
        return None
    error = data.get("error")
    found = error.get("message") if isinstance(error, dict) else error
    found = found or data.get("message") or data.get("detail")
    return one_line(found) if found else None


def _shorten(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "…"


def first_model(client: httpx.Client, url: str) -> str | None:
    """Name of the first model that the server lists; None if it has no such list. Raises ApiError: away, or refused."""
    try:
        answer = client.get(f"{url}/v1/models")
    except httpx.HTTPError as error:
        raise away(url, error) from None
    if answer.status_code == 404:
        return None
    if answer.status_code != 200:
        raise ApiError(error_of(answer.status_code, answer.content), answer.status_code)
    try:
        return answer.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ApiError(f"{url} does not look like an OpenAI-compatible server") from None
