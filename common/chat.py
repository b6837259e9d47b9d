"""Terminal chat with any OpenAI-compatible server: `python -m common.chat --url http://127.0.0.1:8000`.

Answers go to stdout as they come, all else to stderr. With a pipe as input each line is a question, and the first error
ends the program with status 2; in a terminal an error is told and the chat goes on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from common import api, cli

HELP = """/reset          forget the conversation, keep the system message
/system [TEXT]  set the system message; without TEXT take it away
/quit           end, as does Ctrl-D; Ctrl-C stops an answer and keeps what was said"""
# What a model says must not steer the terminal: control characters but tab and line feed are dropped.
MAX_TIMEOUT_S = 1_000_000
CONTROL = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}
Message = dict[str, str]


@dataclass
class Answer:
    """An answer so far. `first_s` and `last_s`: arrival of its first and last text, seconds after the question."""

    text: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    stopped: bool = False

    def summary(self) -> str:
        """`[41 prompt (32 cached) + 87 output tokens, stop; first token 120 ms, then 11.2 ms per token (89.3/s)]`."""
        tokens, prompt = self.usage.get("completion_tokens"), self.usage.get("prompt_tokens")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        counts = (
            ""
            if tokens is None
            else f"{prompt} prompt{f' ({cached} cached)' if cached else ''} + {tokens} output tokens, "
        )
        times = ""
        if self.first_s is not None:
            times = f"; first token {1e3 * self.first_s:.0f} ms"
            if tokens is not None and tokens > 1 and self.last_s > self.first_s:
                each = (self.last_s - self.first_s) / (tokens - 1)
                times += f", then {1e3 * each:.1f} ms per token ({1 / each:.1f}/s)"
        return f"[{counts}{'stopped' if self.stopped else self.finish_reason}{times}]"


@dataclass
class Chat:
    """A conversation with one server; `messages` hold what was asked and answered, without the system message."""

    client: httpx.Client
    url: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def ask(self, question: str, show: Callable[[str], None]) -> Answer:
        """Send the conversation with this question; `show` gets each piece of text when it arrives.

        Ctrl-C ends the answer, which is kept as far as it came; a question without any answer is not kept. Raises
        ApiError when the server is away or answers an error, in the middle of a stream too: then nothing is kept.
        """
        first = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": question}
        body = {"messages": [*first, *self.messages, user], "stream": True, "stream_options": {"include_usage": True}}
        answer, start = Answer(), time.perf_counter()
        try:
            with contextlib.closing(self._pieces(body | self.options, answer)) as pieces:
                for text in pieces:
                    answer.last_s = time.perf_counter() - start
                    if answer.first_s is None:
                        answer.first_s = answer.last_s
                    answer.text += text
                    show(text)
        except KeyboardInterrupt:
            answer.stopped = True
        if answer.text:
            self.messages += [user, {"role": "assistant", "content": answer.text}]
        return answer

    def _pieces(self, body: dict[str, Any], answer: Answer) -> Generator[str, None, None]:
        """The text as it arrives; usage and finish_reason go to `answer`. Closing the iterator closes the connection."""
        parser, path = api.Events(), "/v1/chat/completions"
        try:
            with self.client.stream("POST", self.url + path, json=body) as response:
                if response.status_code != 200:
                    raise api.ApiError(api.error_of(response.status_code, response.read()), response.status_code)
                for data in (data for part in response.iter_raw() for data in parser.feed(part)):
                    if data == api.DONE:
                        return
                    event = api.decode(data)
                    text, finish = api.choice_of(event)
                    answer.usage = event.get("usage") or answer.usage
                    answer.finish_reason = finish or answer.finish_reason
                    if text:
                        yield text
        except httpx.HTTPError as error:
            if answer.text:
                raise api.ApiError(f"the answer broke off ({type(error).__name__})") from None
            raise api.away(self.url, error) from None
        raise api.ApiError("the answer broke off")


def run(chat: Chat, lines: Iterator[str], out: TextIO, err: TextIO, interactive: bool) -> None:
    """Answer each line, obey each command, until the input ends. Raises ApiError only if not `interactive`."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if err.isatty() else ("", "")
    fresh = True  # nothing stands on the current line of the output

    def show(text: str) -> None:
        nonlocal fresh
        fresh = text.endswith("\n")
        out.write(text.translate(CONTROL) if out.isatty() else text)
        out.flush()

    def note(text: str) -> None:
        print(f"{dim}{text}{plain}", file=err, flush=True)

    for line in lines:
        question = line.strip()
        command, _, rest = question.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command.startswith("/"):
            note(obey(chat, command, rest.strip()))
        elif question:
            try:
                answer = chat.ask(question, show)
            except api.ApiError as error:
                if not fresh:
                    show("\n")
                if not interactive:
                    raise
                print(f"error: {error} (the question was not kept)", file=err, flush=True)
                continue
            if not fresh or not answer.text:
                show("\n")
            note(answer.summary())
            if answer.stopped and not interactive:
                raise KeyboardInterrupt


def obey(chat: Chat, command: str, rest: str) -> str:
    """Carry out a command; returns what to tell the user."""
    if command == "/reset":
        chat.messages.clear()
        return "the conversation is forgotten"
    if command == "/system":
        chat.system = rest or None
        return "the system message is set" if rest else "there is no system message"
    if command == "/help":
        return HELP
    return f"unknown command {command}; /help lists all"


def typed() -> Iterator[str]:
    """Lines from the terminal, with editing and history where readline exists; Ctrl-C empties the line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what equips input()
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def _flags() -> cli.Parser:
    parser = cli.parser("common.chat", "Chat with an OpenAI-compatible server.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="address of the server (default: http://127.0.0.1:8000)")
    add("--model", help="name of the model there (default: the first that the server lists)")
    add("--system", metavar="TEXT", help="system message")
    add("--temperature", type=float, metavar="X", help="0 is greedy (default: the server's)")
    add("--max-tokens", type=int, metavar="N", help="output tokens per answer at most (default: the server's)")
    add("--api-key", metavar="KEY", help="sent as bearer token")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds to wait for each piece (default: 300)")
    return parser


def main() -> int:
    parser = _flags()
    args = parser.parse_args()
    url = api.base_url(args.url)
    if args.max_tokens is not None and args.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, not {args.max_tokens}")
    if not 0 < args.timeout <= MAX_TIMEOUT_S:
        parser.error(f"--timeout must be positive and at most {MAX_TIMEOUT_S:,} seconds, not {args.timeout}")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        # A shell may start background jobs with SIGINT ignored, and then Ctrl-C would never reach us.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    client = httpx.Client(
        headers=api.headers(args.api_key),
        timeout=httpx.Timeout(args.timeout, connect=10.0),
        limits=httpx.Limits(keepalive_expiry=api.IDLE_S),
        trust_env=not api.is_loopback(url),  # a proxy must not get between
    )
    with client:
        given = {"model": args.model or api.first_model(client, url)}
        given |= {"temperature": args.temperature, "max_tokens": args.max_tokens}
        chat = Chat(client, url, {k: v for k, v in given.items() if v is not None}, args.system)
        if interactive:
            print(f"{given['model'] or url}: /help lists the commands", file=sys.stderr)
        run(chat, typed() if interactive else iter(sys.stdin), sys.stdout, sys.stderr, interactive)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
