"""The worker processes: gunicorn forks and watches them, `GatewayWorker` serves in them.

gunicorn gets the listening sockets from the launcher, so they outlive it. What is
opened before the fork is the segment's mapping and nothing else.
"""

from gevent import monkey

# gunicorn's parent needs the real fork, signals and queue (it waits in SimpleQueue.get); no worker uses them.
monkey.patch_all(os=False, signal=False, queue=False)

import gc  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import gevent  # noqa: E402
from gevent import hub  # noqa: E402
from gevent.pool import Pool  # noqa: E402
from gevent.server import StreamServer  # noqa: E402
from gunicorn.app.base import BaseApplication  # noqa: E402
from gunicorn.arbiter import Arbiter  # noqa: E402
from gunicorn.glogging import Logger  # noqa: E402
from gunicorn.workers.ggevent import GeventWorker  # noqa: E402

from conf import log  # noqa: E402
from conf.child import die_with_parent, parse_arguments  # noqa: E402
from conf.load import decode  # noqa: E402
from conf.schema import Config  # noqa: E402
from gateway.access import Accountant  # noqa: E402
from gateway.admission_link import AdmissionLink  # noqa: E402
from gateway.app import RELAYED_PATHS, make_app, make_plain_app  # noqa: E402
from gateway.connection import Sweep  # noqa: E402
from gateway.dispatch import Dispatcher  # noqa: E402
from gateway.lease import WorkerAdmission  # noqa: E402
from gateway.plain import HOT_PATHS, PlainAccountant, PlainDispatcher  # noqa: E402
from gateway.progress import ProgressTracker  # noqa: E402
from gateway.routing import EndpointSignals, Routing  # noqa: E402
from gateway.server import HttpServer, WsgiApp  # noqa: E402
from gateway.upstream import UpstreamPools  # noqa: E402
from shm import definitions  # noqa: E402
from shm.bands import BandCells, LeaseRow  # noqa: E402
from shm.endpoints import EndpointTable  # noqa: E402
from shm.inflight import InflightRow, InflightSums  # noqa: E402
from shm.layout import FixedSlot, Phase, SlotState  # noqa: E402
from shm.marks import CooldownMarks  # noqa: E402
from shm.metrics import MetricsRow  # noqa: E402
from shm.progress import ProgressRow  # noqa: E402
from shm.rows import WorkerSlot, reap_dead  # noqa: E402
from shm.segment import Segment, SegmentMismatch  # noqa: E402

_log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 120
"""Silence after which gunicorn kills a worker; a long JSON parse must not look like a hang (case B99)."""
DRAIN_MARGIN_S = 10
"""What gunicorn waits beyond the drain time-out before it kills."""
TICK_S = 0.25
"""How often a worker looks for a new configuration, a new endpoint table and the end of its drain."""


class _Kit(NamedTuple):
    """What plain proxy mode has of its own."""

    dispatcher: type[Dispatcher]
    accountant: type[Accountant]
    log: type[log.AccessLog]
    make_app: Callable[..., WsgiApp]
    hot_paths: frozenset[str]


_FULL = _Kit(Dispatcher, Accountant, log.AccessLog, make_app, RELAYED_PATHS)
_PLAIN = _Kit(PlainDispatcher, PlainAccountant, log.PlainLog, make_plain_app, HOT_PATHS)


class GatewayWorker(GeventWorker):
    """One worker process; gunicorn calls `run` after the fork."""

    segment: Segment
    config: Config
    sockets: list[Any]

    def patch(self) -> None:
        # Patched before the fork already; only the sockets have to become gevent's.
        self.sockets = [
            gevent.socket.socket(s.FAMILY, socket.SOCK_STREAM, fileno=s.sock.detach()) for s in self.sockets
        ]

    def init_process(self) -> None:
        self.segment = self.cfg.llmgw_segment
        hub.reinit()
        super().init_process()

    def load_wsgi(self) -> None:
        # The falcon application is made in `run`, from objects that exist only after the fork.
        self.wsgi = None

    def run(self) -> None:
        """Serve until told to stop, then drain."""
        self._generation = self.segment.config_generation
        config = decode(self.segment.read_config())
        log.setup("worker", config.log, config.instance)
        self.slot = WorkerSlot.claim(self.segment)
        row = MetricsRow(self.segment, self.slot)
        kit = _PLAIN if config.plain_proxy else _FULL
        self._accountant = kit.accountant(row, kit.log(config.log, "worker", config.instance))
        marks = CooldownMarks(self.segment, self.slot)
        self._table = EndpointTable(self.segment)
        bands = BandCells(self.segment)
        self._signals = EndpointSignals(self._table, InflightSums(self.segment), marks, bands)
        self._pools = UpstreamPools()
        self._routing = Routing(config, self._signals)
        rng = random.Random()
        leases = LeaseRow(self.segment, self.slot)
        self._link = AdmissionLink(self.segment.directory, leases)
        progress = ProgressTracker(ProgressRow(self.segment, self.slot), self._has_watchdog)
        self._dispatcher = kit.dispatcher(
            self._current_routing,
            self._pools,
            InflightRow(self.segment, self.slot),
            marks,
            self._accountant,
            WorkerAdmission(bands, leases, self._link),
            progress,
            rng,
        )
        self._sweep = Sweep()
        app = kit.make_app(self._dispatcher, self._current_routing, self._is_stopping)
        self._http = HttpServer(
            app, config, self.cfg, self._sweep, self._accountant, rng, kit.hot_paths, self._dispatcher.run
        )
        self._sweep.hooks += [self._pools.close_idle, self._link.tick, progress.sweep]
        self._sweep.start()
        servers = [self._listen(sock, config) for sock in self.sockets]
        # What lives as long as the process is not looked at again; a request leaves no cycles behind, so the
        # collector has little to find and need not look often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)
        self.slot.set_state(SlotState.SERVING)
        _log.info("worker_serving", extra={"slot": self.slot.index})
        # The phase is looked at as well: a SIGTERM between the fork and gunicorn's set-up of signals is lost.
        while self.alive and self.segment.phase is Phase.RUNNING and self._is_parent_alive():
            self._tick()
            gevent.sleep(TICK_S)
        self._drain(servers)

    def _is_stopping(self) -> bool:
        # The phase counts for all workers at once: a load balancer must not hear "ready" from the slowest.
        return self._http.is_draining or self.segment.phase is not Phase.RUNNING

    def _listen(self, sock: socket.socket, config: Config) -> StreamServer:
        sock.setblocking(True)
        server = StreamServer(sock, handle=self._http.handle, spawn=Pool(config.max_connections))
        if self.cfg.workers > 1:
            # One accept a turn, so that a busy worker does not take connections from an idle one.
            server.max_accept = 1
        server.start()
        return server

    def _has_watchdog(self) -> bool:
        return any(pool.stuck_after for pool in self._routing.config.pools.values())

    def _current_routing(self) -> Routing:
        if self._table.generation != self.segment.endpoints_generation:
            self._take_up_table()
        return self._routing

    def _take_up_table(self) -> None:
        try:
            self._table.refresh_if_changed()
        except SegmentMismatch:
            _log.warning("endpoint_table_unreadable", exc_info=True)
            return
        self._routing = Routing(self._routing.config, self._signals)
        self._pools.keep(self._table.records)

    def _take_up_config(self) -> None:
        generation = self.segment.config_generation
        try:
            config = decode(self.segment.read_config())
        except SegmentMismatch:
            _log.warning("configuration_unreadable", exc_info=True)
            return
        self._generation = generation
        self._routing = Routing(config, self._signals)
        self._http.config = config
        _log.info("configuration_taken_up", extra={"generation": generation})

    def _tick(self) -> None:
        self.tmp.notify()
        self.slot.heartbeat(time.monotonic())
        if self.segment.config_generation != self._generation:
            self._take_up_config()

    def _is_parent_alive(self) -> bool:
        return bool(self.ppid == os.getppid())

    def _drain(self, servers: list[StreamServer]) -> None:
        """Let running requests finish, up to the drain time-out; then end them."""
        self._http.drain()
        self._dispatcher.is_draining = True
        self.slot.set_state(SlotState.DRAINING)
        is_planned = self.segment.phase is Phase.DRAINING and self._is_launcher_alive()
        if not is_planned:
            # Somebody else takes over the address: leave it to them at once.
            for server in servers:
                server.close()
        drain_s = self._routing.config.drain_timeout
        deadline = time.monotonic() + drain_s
        _log.info("worker_draining", extra={"active": self._http.active, "drain_timeout_s": drain_s})
        while self._http.active and time.monotonic() < deadline:
            self.tmp.notify()
            self._http.close_idle()
            gevent.sleep(0.05)
        if self._http.active:
            _log.warning("drain_timeout", extra={"ended": self._http.active})
            self._http.end_all()
            stop = time.monotonic() + 2
            while self._http.active and time.monotonic() < stop:
                gevent.sleep(0.05)
        for server in servers:
            server.close()
            server.pool.kill(timeout=1)
        self._sweep.stop()
        self.slot.release()

    def _is_launcher_alive(self) -> bool:
        try:
            os.kill(self.segment.launcher_pid, 0)
        except ProcessLookupError:
            return False
        return True


class _RoutedLogger(Logger):
    """gunicorn's own messages, as records of our logging."""

    def setup(self, cfg: Any) -> None:
        self.error_log = logging.getLogger("gunicorn.error")
        self.access_log = logging.getLogger("gunicorn.access")
        self.error_log.propagate = True

    def access(self, *args: Any, **kwargs: Any) -> None:
        """Requests are logged by `gateway.access`."""

    def reopen_files(self) -> None:
        """Nothing is open here."""

    def close_on_exec(self) -> None:
        """Nothing is open here."""


class _Arbiter(Arbiter):
    """gunicorn's parent process; it kills by the drain time-out in force, not by that of its start."""

    def stop(self, graceful: bool = True) -> None:
        self.app.take_up_drain_timeout()
        super().stop(graceful)


class Workers(BaseApplication):
    """gunicorn, told everything by the launcher's configuration and nothing by files or environment."""

    def __init__(self, segment: Segment, config: Config, fds: tuple[int, ...], row: MetricsRow) -> None:
        self._segment = segment
        self._config = config
        self._fds = fds
        self._restarts = row.counter(definitions.PROCESS_RESTARTS, ("worker",))
        self._reaped = row.counter(definitions.SLOTS_REAPED)
        self._returned = row.counter(definitions.INFLIGHT_RETURNED)
        super().__init__()

    def load_config(self) -> None:
        config = self._config
        self.cfg.llmgw_segment = self._segment
        for key, value in {
            "bind": [f"fd://{fd}" for fd in self._fds],
            "workers": config.workers,
            "worker_class": GatewayWorker,
            "timeout": HEARTBEAT_TIMEOUT_S,
            "graceful_timeout": int(config.drain_timeout) + DRAIN_MARGIN_S,
            "logger_class": _RoutedLogger,
            "control_socket_disable": True,
            "header_map": "drop",
            # The careful one of the two parsers; `gateway.connection` itself uses the quick one.
            "http_parser": "python",
            "limit_request_line": 8190,
            "worker_tmp_dir": "/dev/shm",
            "child_exit": self._give_back,
        }.items():
            self.cfg.set(key, value)

    def load(self) -> None:
        """Nothing to load before the fork."""

    def run(self) -> None:
        """Run until told to stop."""
        _Arbiter(self).run()

    def take_up_drain_timeout(self) -> None:
        """Tell gunicorn how long workers may drain; a reload may have changed it."""
        try:
            config = decode(self._segment.read_config())
        except SegmentMismatch:
            _log.warning("configuration_unreadable", exc_info=True)
            return
        self.cfg.set("graceful_timeout", int(config.drain_timeout) + DRAIN_MARGIN_S)

    def _give_back(self, arbiter: Arbiter, worker: GatewayWorker) -> None:
        """A worker has ended: return what it had in flight at once, coordinator or not."""
        if self._segment.phase is Phase.RUNNING:
            self._restarts.inc()
        for slot in reap_dead(self._segment):
            self._reaped.inc()
            self._returned.inc(slot.inflight_returned)
            _log.warning(
                "worker_reaped",
                extra={"slot": slot.slot, "pid": slot.pid, "inflight": slot.inflight_returned},
            )


def main(argv: list[str]) -> int:
    """Run gunicorn's parent process; the launcher starts it.

    Args:
        argv: `--segment DIR --fds 3,4`.
    """
    args = parse_arguments("llmgw workers", argv)
    segment = Segment.attach(args.segment)
    die_with_parent(segment.launcher_pid)
    config = decode(segment.read_config())
    log.setup("workers", config.log, config.instance)
    slot = WorkerSlot.claim_fixed(segment, FixedSlot.ARBITER)
    slot.set_state(SlotState.SERVING)
    try:
        Workers(segment, config, args.fds, MetricsRow(segment, slot)).run()
    finally:
        slot.release()
    return 0
