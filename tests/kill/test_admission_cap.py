"""The hard cap of a pool: exact under any number of workers, whoever leaves or is killed.

What counts as running at the engine: a request from the moment it is read to its answer's end or to the
moment at which the engine notices that its connection is closed. So a lease given back too early would show.
"""

from __future__ import annotations

import random
import select
import signal
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.cells import Cells, cells_of
from tests.support.flood import body
from tests.support.gateway import Gateway, Gateways, config_for, endpoint
from tests.support.processes import Programs
from tests.support.raw_client import RawClient, chat
from tests.support.sim import SimEngine
from tests.support.wait import wait_until

MODEL = "sim-model"
CAP = 16
WORKERS = 8
REQUESTS = 2000
AT_ONCE = 150
KILLS = 8
LEAVING = 0.2


class Storm:
    """Clients that ask once each, of whom some leave, at any moment.

    Attributes:
        answered: whole answers; `left`: clients that went; `cut`: connections that ended on their own.
    """

    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._rng = rng
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, float, bytes]] = {}
        self.opened = self.answered = self.left = self.cut = 0
        self.statuses: dict[int, int] = {}

    @property
    def under_way(self) -> int:
        return len(self._open)

    def open(self, data: bytes) -> None:
        """Connect and ask; one in five leaves within 0.3 s."""
        band = self._rng.choice((b"platinum", b"gold", b"silver", b"bronze"))
        tenant = b"t%d" % self._rng.randrange(20)
        sock = socket.create_connection(self._address, timeout=10)
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: storm\r\ncontent-type: application/json\r\n"
            b"x-llmgw-band: %b\r\nx-tenant-id: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (band, tenant, len(data), data)
        )
        leaves_at = float("inf")
        if self._rng.random() < LEAVING:
            leaves_at = time.monotonic() + self._rng.random() * 0.3
        self._open[sock.fileno()] = (sock, leaves_at, b"")
        self._poll.register(sock, select.EPOLLIN)
        self.opened += 1

    def turn(self) -> None:
        """Read what there is, and let leave who is due."""
        for fd, _ in self._poll.poll(0.01):
            sock, leaves_at, seen = self._open[fd]
            try:
                data = sock.recv(65536)
            except ConnectionError:
                data = b""
            seen += data
            if not data:
                self.cut += 1
            elif seen.endswith(b"\r\n0\r\n\r\n") or (b"content-length" in seen and seen.endswith(b"}")):
                status = int(seen[9:12])
                self.statuses[status] = self.statuses.get(status, 0) + 1
                self.answered += 1
            else:
                self._open[fd] = (sock, leaves_at, seen)
                continue
            self._close(fd)
        now = time.monotonic()
        for fd in [fd for fd, (_, leaves_at, _) in self._open.items() if leaves_at <= now]:
            self.left += 1
            self._close(fd)

    def close(self) -> None:
        for fd in list(self._open):
            self._close(fd)
        if not self._poll.closed:
            self._poll.close()

    def _close(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._open.pop(fd)[0].close()


@pytest.fixture
def storms() -> Iterator[list[Storm]]:
    """Storms to be closed at the end."""
    opened: list[Storm] = []
    yield opened
    for storm in opened:
        storm.close()


@pytest.fixture
def engine(programs: Programs) -> SimEngine:
    return SimEngine(programs, "--max-num-seqs", "1000", "--ttft-ms", "8", "--itl-ms", "3")


@pytest.fixture
def capped(programs: Programs, gateway: Gateways, engine: SimEngine) -> Gateway:
    """Eight workers before an engine that may have 16 requests, and a model beside it without a cap."""
    admission = {"queue_ttl": "60s", "assumed_batch_capacity": 1000}
    return gateway(
        config_for(
            [
                endpoint("e0", engine.url, model=MODEL),
                endpoint("free", SimEngine(programs, "--model", "free").url, model="free", pool="free"),
            ],
            workers=WORKERS,
            log={"level": "warning"},
            pools={"default": {"max_concurrent": CAP}},
            router={"scrape_interval": "200ms", "admission": admission},
        )
    )


@pytest.fixture
def cells(capped: Gateway) -> Iterator[Cells]:
    with cells_of(capped) as read:
        yield read


def serving(gateway: Gateway) -> list[psutil.Process]:
    """Return the workers that serve; their parent is one of the same kind."""
    kind = gateway.processes("workers")
    pids = {process.pid for process in kind}
    return [process for process in kind if process.ppid() in pids]


def all_are_usable(gateway: Gateway, engine: SimEngine, cells: Cells, storms: list[Storm]) -> None:
    """Assert that as many run as may, no more, and that everything is given back after them."""
    rng = random.Random(1)
    engine.configure(itl_ms=50)
    last = Storm(gateway.url, rng)
    storms.append(last)
    rng.random = lambda: 0.99  # type: ignore[method-assign]  # nobody leaves
    for number in range(CAP + 10):
        last.open(body(f"{number:08} last", model=MODEL, max_tokens=1000))
    wait_until(
        lambda: engine.stats()["running"] == CAP and sum(cells.waiters) == 10,
        10,
        lambda: f"{engine.stats()} {cells.all_of_it()}",
    )
    wait_until(lambda: cells.leases == CAP, 2)  # a lease on its way is counted at both ends
    last.close()
    wait_until(cells.is_zero, 5, lambda: f"{cells.all_of_it()}")
    wait_until(lambda: engine.stats()["running"] == 0, 5)


@pytest.mark.timeout(180)
def test_the_engine_never_sees_more_than_the_cap_through_cancellations_and_killed_workers(
    capped: Gateway, engine: SimEngine, cells: Cells, storms: list[Storm]
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    storm = Storm(capped.url, rng)
    storms.append(storm)
    kill_at = sorted(rng.randrange(200, REQUESTS - 100) for _ in range(KILLS))
    deadline = time.monotonic() + 120
    while storm.opened < REQUESTS or storm.under_way:
        assert time.monotonic() < deadline, (storm.opened, storm.under_way, cells.all_of_it())
        while storm.opened < REQUESTS and storm.under_way < AT_ONCE:
            if kill_at and storm.opened >= kill_at[0]:
                kill_at.pop(0)
                rng.choice(serving(capped)).kill()
            storm.open(body(f"{storm.opened:08}", model=MODEL, max_tokens=rng.randrange(1, 12)))
        storm.turn()
    storm.close()
    print(storm.statuses, "left", storm.left, "cut", storm.cut, engine.stats()["max_running_seen"])

    assert engine.stats()["max_running_seen"] == CAP, "fewer: it was no storm; more: the cap does not hold"
    assert set(storm.statuses) == {200}
    assert storm.answered > REQUESTS / 2
    wait_until(cells.is_zero, 5, lambda: f"{cells.all_of_it()}")
    all_are_usable(capped, engine, cells, storms)


@pytest.mark.timeout(120)
def test_a_killed_coordinator_costs_those_who_wait_neither_place_nor_time(
    capped: Gateway, engine: SimEngine, cells: Cells, storms: list[Storm]
) -> None:
    engine.configure(itl_ms=20)
    storm = Storm(capped.url, rng := random.Random(1))
    storms.append(storm)
    rng.random = lambda: 0.99  # type: ignore[method-assign]  # nobody leaves
    rng.choice = lambda bands: bands[1]  # type: ignore[assignment,method-assign]  # all gold
    rng.randrange = lambda *_: 1  # type: ignore[assignment,method-assign]  # of one tenant
    for number in range(CAP):
        storm.open(body(f"{number:08} first", model=MODEL, max_tokens=150))
    wait_until(lambda: engine.stats()["running"] == CAP, 10)
    asked_at = time.monotonic()
    for number in range(60):  # in order, and known to the coordinator in order
        storm.open(body(f"{number:08} waits", model=MODEL, max_tokens=1))
        wait_until(lambda number=number: sum(cells.waiters) == number + 1, 5, interval=0.002)

    (coordinator,) = capped.processes("coordinator")
    capped.program.signal(signal.SIGSTOP)  # the launcher: no new coordinator yet
    coordinator.kill()
    for _ in range(2 * WORKERS):  # whoever need not wait is served meanwhile
        with RawClient(capped.url) as client:
            client.post(chat(stream=False, model="free", max_tokens=1))
            assert client.status == 200
    assert sum(cells.waiters) == 60
    killed_at = time.monotonic()
    capped.program.signal(signal.SIGCONT)
    wait_until(lambda: len(capped.processes("coordinator")) == 1, 5)
    resumed_at = 0.0
    while storm.under_way:
        assert time.monotonic() < killed_at + 30, cells.all_of_it()
        storm.turn()
        if not resumed_at and sum(cells.waiters) < 60:
            resumed_at = time.monotonic()
    storm.close()
    freed_at = asked_at + 150 * 0.020  # when the first 16 end
    assert resumed_at - max(killed_at, freed_at) < 2.0
    assert storm.statuses == {200: CAP + 60}
    order = [int(seen.json()["messages"][0]["content"][:8]) for seen in engine.seen(60)]
    # Those who are granted at one moment go through eight workers; the next ones may overtake the slowest.
    assert max(abs(place - number) for place, number in enumerate(order)) < 2 * CAP, order
    assert engine.stats()["max_running_seen"] == CAP
    wait_until(cells.is_zero, 5, lambda: f"{cells.all_of_it()}")
