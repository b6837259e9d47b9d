"""A server of several processes: the same answers, and an end that nobody overlooks, whatever dies and when."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from common.service import Server, group
from tests.conftest import ROOT
from tests.ranks import PROCESS_CHAPTERS, alive, gone, ranks_of
from tests.serving import MAX_MODEL_LEN, Served, texts, tiny_flags, tiny_folder, until

NOTICED_S = 10.0  # within which clients know that a rank has died, and no process is left
LONG = {"prompt": "the cat", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
PHASES = ("idle", "prefill", "decode")
CASES = [(1, "decode"), (0, "idle")]
EVERY_CASE = [
    pytest.param(rank, phase, marks=[] if (rank, phase) in CASES else pytest.mark.full)
    for phase in PHASES
    for rank in (0, 1)
]


@pytest.fixture(params=PROCESS_CHAPTERS)
def chapter(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def two(chapter: str) -> Iterator[Server]:
    """A server whose model is shared by two ranks."""
    with Server(chapter, *tiny_flags(), "--tp", "2") as server:
        yield server


def test_two_ranks_answer_over_http_what_one_does_offline(chapter: str, two: Server) -> None:
    options = {"model": str(tiny_folder()), "dtype": "float32", "threads": 1, "max_model_len": MAX_MODEL_LEN}
    served = Served(chapter, two.url, options)
    want = served.offline("the cat", max_tokens=12, temperature=0.0)
    assert served.good(prompt="the cat", max_tokens=12, temperature=0)["choices"][0]["text"] == want.text
    assert texts(served.events(prompt="the cat", max_tokens=12, temperature=0)) == [want.text]
    assert served.metrics()["minisgl_allreduce_bytes_total"] > 0
    served.close()
    assert len(ranks_of(two.pid)) == 2
    assert listeners(group(two.pid)) <= {"127.0.0.1"}
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in group(two.pid)]
    assert not any("/dev/shm/" in text for text in maps), "shared memory has no name that could be left behind"
    assert (two.stop(), two.survivors) == (0, [])
    assert "Traceback" not in two.log and "terminate" not in two.log


def listeners(pids: list[int]) -> set[str]:
    """Addresses at which these processes listen for TCP connections."""
    inodes = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()}
    found = set()
    for table, width in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                packed = bytes.fromhex(local.split(":")[0])
                words = b"".join(packed[i : i + 4][::-1] for i in range(0, width, 4))
                found.add(socket.inet_ntop(socket.AF_INET if width == 4 else socket.AF_INET6, words))
    return found


@pytest.mark.fault(22)
@pytest.mark.parametrize(("rank", "phase"), EVERY_CASE)
def test_a_killed_rank_fails_what_is_open_and_ends_the_server(two: Server, rank: int, phase: str) -> None:
    victims = ranks_of(two.pid)
    everyone = group(two.pid)
    with ThreadPoolExecutor(3) as pool, httpx.Client(base_url=two.url, trust_env=False, timeout=30) as client:
        body = {**LONG, "prompt": [5] * 500, "max_tokens": 4} if phase == "prefill" else LONG
        whole = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(2 * (phase != "idle"))]
        begun = threading.Event()
        stream = pool.submit(ends_with_an_error, client, begun) if phase == "decode" else None
        if stream:
            assert begun.wait(20)
        else:
            time.sleep({"idle": 0.5, "prefill": 0.01}[phase])
        killed = time.monotonic()
        os.kill(victims[rank], signal.SIGKILL)
        for answer in whole:
            assert answer.result().status_code == 503
            assert f"rank {rank} ended with signal SIGKILL" in answer.result().json()["error"]["message"]
        assert stream is None or stream.result()
        for _ in range(100):
            try:
                if client.get("/health").status_code == 503:
                    break
            except httpx.TransportError:  # it has gone
                break
            time.sleep(0.1)
        assert time.monotonic() - killed < NOTICED_S
    gone(everyone, NOTICED_S - (time.monotonic() - killed))
    assert two.stop() == 1
    assert f"error: rank {rank} ended with signal SIGKILL" in two.log


def ends_with_an_error(client: httpx.Client, begun: threading.Event) -> bool:
    text = ""
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        for part in answer.iter_text():
            begun.set()
            text += part
    assert '"error"' in text.strip().splitlines()[-1]
    return "[DONE]" not in text


@pytest.mark.fault(22)
@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 1.0, 2.0])
def test_a_rank_killed_while_loading_ends_the_server(chapter: str, rank: int, delay: float) -> None:
    command = [sys.executable, "-m", f"{chapter}.serve", "--port", "0", *tiny_flags(), "--tp", "2"]
    server = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(ranks_of(server.pid)) == 2)
        time.sleep(delay)
        everyone = group(server.pid)
        os.kill(ranks_of(server.pid)[rank], signal.SIGKILL)
        assert server.wait(NOTICED_S) == 1
        gone(everyone)
    finally:
        end(server)


def test_what_cannot_start_says_so_in_one_line_and_leaves_nobody(chapter: str) -> None:
    for flags, words in (
        (["--tp", "3"], "tp can be 1, 2, 4, 8"),
        (["--tp", "2", "--kv-memory", "1K"], "kv_memory"),
    ):
        command = [sys.executable, "-m", f"{chapter}.serve", "--port", "0", *tiny_flags(), *flags]
        server = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True)
        try:
            _, said = server.communicate(timeout=200)
        finally:
            end(server)
        assert (server.returncode, len(said.splitlines())) == (2, 1), said
        assert words in said
        assert group(server.pid) == []


def test_a_drain_lets_an_open_stream_finish_and_leaves_nobody(chapter: str, two: Server) -> None:
    everyone = group(two.pid)
    served = Served(chapter, two.url)
    with served.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.killpg(two.pid, signal.SIGTERM)  # as a supervisor or Ctrl-C does it: all processes get it
        rest = list(lines)
    served.close()
    assert "data: [DONE]" in rest[-2:]
    gone(everyone)
    assert two.stop() == 0


def test_ranks_end_with_a_server_that_is_killed(two: Server) -> None:
    everyone = group(two.pid)
    os.kill(two.pid, signal.SIGKILL)
    gone(everyone)


@pytest.mark.fault(27)
def test_two_servers_share_a_machine(chapter: str, two: Server) -> None:
    with Server(chapter, *tiny_flags(), "--tp", "2") as other:
        answers = []
        for server in (two, other, two):
            served = Served(chapter, server.url)
            answers.append(served.good(prompt="the cat", max_tokens=8, temperature=0)["choices"])
            served.close()
        assert answers[0] == answers[1] == answers[2]
        other.stop()
    assert all(alive(pid) for pid in ranks_of(two.pid))


# ---- several hosts --------------------------------------------------------------------------------------------------


def end(process: subprocess.Popen[str]) -> None:
    """Kill it and its process group, whose leader may have gone before the others."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stderr and not process.stderr.closed:
        process.communicate()


IPV6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def host_flags(rank: int, address: str, port: int) -> list[str]:
    where = ["--master-addr", address, "--master-port", str(port)]
    return ["--tp", "2", "--nnodes", "2", "--node-rank", str(rank), *where]


@contextmanager
def two_hosts(chapter: str, address: str = "127.0.0.1") -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    """Two process groups that share nothing but an address: the one that answers requests, and the other."""
    port = free_port()
    command = [sys.executable, "-m", f"{chapter}.serve", *tiny_flags(), *host_flags(1, address, port)]
    second = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        with Server(chapter, *tiny_flags(), *host_flags(0, address, port)) as first:
            yield first, second
    finally:
        end(second)


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.full)])
def test_two_hosts_serve_and_end_together(chapter: str, address: str) -> None:
    if address == "::1" and not IPV6:
        pytest.skip("this machine has no IPv6")
    with two_hosts(chapter, address) as (first, second):
        served = Served(chapter, first.url, {"model": str(tiny_folder()), "dtype": "float32", "threads": 1})
        want = served.offline("the cat", max_tokens=12, temperature=0.0)
        assert served.good(prompt="the cat", max_tokens=12, temperature=0)["choices"][0]["text"] == want.text
        served.close()
        assert first.stop() == 0
        assert second.wait(NOTICED_S) == 0
    assert group(second.pid) == []


@pytest.mark.full
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_is_lost_ends_the_other_one(chapter: str, host: int) -> None:
    with two_hosts(chapter) as (first, second):
        everyone = group(first.pid) + group(second.pid)
        os.killpg((first.pid, second.pid)[host], signal.SIGKILL)  # while idle
        gone(everyone, NOTICED_S)
        assert first.stop() == (-signal.SIGKILL, 1)[host]


@pytest.mark.parametrize("chapter", PROCESS_CHAPTERS[:1])
def test_a_rank_that_is_lost_on_one_host_is_said_in_one_line_on_each(chapter: str) -> None:
    with two_hosts(chapter) as (first, second):
        (rank,) = set(group(second.pid)) - {second.pid}
        os.kill(rank, signal.SIGKILL)
        _, said = second.communicate(timeout=NOTICED_S)
        assert second.returncode == 1
        assert said.splitlines()[1:] == ["error: rank 1 ended with signal SIGKILL"], "after what it says at its start"
        gone(group(first.pid), NOTICED_S)
        assert first.stop() == 1
        lost = [line for line in first.log.splitlines() if not line.startswith("ready: ")]
        assert len(lost) == 1 and "error: RankError: rank 0 has lost the others" in lost[0], "and no traceback"


@pytest.mark.full
def test_torchrun_starts_the_ranks_as_well(chapter: str) -> None:
    port = str(free_port())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command = [*torchrun, "-m", f"{chapter}.serve", "--port", "0", *tiny_flags()]
    server = Server.of(command)
    with server:
        served = Served(chapter, server.url, {"model": str(tiny_folder()), "dtype": "float32", "threads": 1})
        want = served.offline("the cat", max_tokens=12, temperature=0.0)
        assert served.good(prompt="the cat", max_tokens=12, temperature=0)["choices"][0]["text"] == want.text
        served.close()
        server.stop()
        assert server.survivors == []


@pytest.mark.full
def test_two_network_namespaces_serve(chapter: str) -> None:
    """Two hosts with an address of their own each, joined by a cable; the second has no other way to the first."""
    script = f"""
        set -e
        trap 'kill $(jobs -p) 2>/dev/null' EXIT
        ip link set lo up
        unshare --net sleep 600 & other=$!
        sleep 0.5
        ip link add cable0 type veth peer name cable1
        ip link set cable1 netns $other
        ip addr add 10.77.0.1/24 dev cable0; ip link set cable0 up
        nsenter --net=/proc/$other/ns/net ip link set lo up
        nsenter --net=/proc/$other/ns/net ip addr add 10.77.0.2/24 dev cable1
        nsenter --net=/proc/$other/ns/net ip link set cable1 up
        serve="{sys.executable} -m {chapter}.serve --port 8017 {" ".join(tiny_flags())}"
        hosts="--tp 2 --nnodes 2 --master-addr 10.77.0.1 --master-port 29600"
        nsenter --net=/proc/$other/ns/net $serve $hosts --node-rank 1 & second=$!
        $serve $hosts --node-rank 0 & first=$!
        for i in $(seq 600); do
            curl -sf --noproxy '*' http://127.0.0.1:8017/health -o /dev/null && break; sleep 0.2
        done
        curl -s --noproxy '*' http://127.0.0.1:8017/v1/completions -H 'content-type: application/json' \\
            -d '{{"prompt": "the cat", "max_tokens": 12, "temperature": 0}}'
        kill -TERM $first
        wait $first; wait $second
    """
    unshare = ["unshare", "--net", "--map-root-user", "bash", "-c", script]
    if subprocess.run(["unshare", "--net", "--map-root-user", "ip", "link"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    done = subprocess.run(unshare, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    options = {"model": str(tiny_folder()), "dtype": "float32", "threads": 1}
    served = Served(chapter, "http://127.0.0.1:1", options)
    want = served.offline("the cat", max_tokens=12, temperature=0.0)
    served.close()
    assert json.loads(done.stdout)["choices"][0]["text"] == want.text
