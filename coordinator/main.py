"""The coordinator: one process per host that watches the endpoints and serves the admin listener.

Started by the launcher, and started again by it on the same segment: endpoints keep their slots and states,
counters go on. Greenlets, all owned by `Coordinator`:

    config        every second: takes up a newer configuration
    admission     accepts workers; a greenlet per connection: coordinator.admission
    grants        while somebody waits: looks for room
    reaper        every 250 ms: gives back the slots of dead processes, shows that this one lives
    stuck         every 250 ms: flags endpoints whose requests make no progress: coordinator.stuck
    <endpoint>    one per endpoint: coordinator.scrape
    (server)      pywsgi's accept loop and a greenlet per admin connection

Signals: SIGTERM and SIGINT end it; nothing here has to be drained. It ends with the launcher.
Exit codes: 0 as told; 1 a greenlet failed, the launcher starts another; 3 cannot start.
"""

from gevent import monkey

monkey.patch_all()

import logging  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

import gevent  # noqa: E402
import msgspec  # noqa: E402
from gevent.event import Event  # noqa: E402

from conf import child as conf_child  # noqa: E402
from conf import load as conf_load  # noqa: E402
from conf import log as conf_log  # noqa: E402
from conf.schema import Config  # noqa: E402
from conf.values import parse_listen  # noqa: E402
from coordinator.admin.app import make_app  # noqa: E402
from coordinator.admin.server import AdminServer, inherited, open_listener  # noqa: E402
from coordinator.admission import AdmissionServer  # noqa: E402
from coordinator.fleet import Fleet  # noqa: E402
from coordinator.greenlets import Greenlets  # noqa: E402
from coordinator.peers import Peers  # noqa: E402
from coordinator.scrape import Scrapers  # noqa: E402
from coordinator.stuck import StuckWatch  # noqa: E402
from shm.definitions import INFLIGHT_RETURNED, SLOTS_REAPED  # noqa: E402
from shm.endpoints import EndpointTableFull  # noqa: E402
from shm.layout import FixedSlot, SlotState  # noqa: E402
from shm.metrics import MetricsRow  # noqa: E402
from shm.rows import NoFreeSlot, WorkerSlot, reap_dead  # noqa: E402
from shm.segment import Segment, SegmentMismatch  # noqa: E402

LOG = logging.getLogger(__name__)

CONFIG_TURN_S = 1.0
REAP_TURN_S = 0.25


class Coordinator:
    """The process, wired."""

    def __init__(self, segment: Segment, slot: WorkerSlot, config: Config, fds: Sequence[int]) -> None:
        """Wire everything; nothing runs yet.

        Args:
            segment: attached.
            slot: the coordinator's.
            config: the one of `segment.config_generation` or newer.
            fds: admin listeners; none: open one as configured.

        Raises:
            OSError: the admin listener cannot be opened.
        """
        self._segment = segment
        self._slot = slot
        self._config = config
        metrics = MetricsRow(segment, slot)
        self._reaped = metrics.counter(SLOTS_REAPED)
        self._returned = metrics.counter(INFLIGHT_RETURNED)
        self._stop = Event()
        self._has_failed = False
        self._is_table_full = False
        self._greenlets = Greenlets(self._on_failure)
        self._scrapers = Scrapers(
            segment, metrics, clock=time.monotonic, rng=random.Random(), on_failure=self._on_failure
        )
        self._peers: Peers | None = None
        if config.redis.url:
            self._peers = Peers(
                segment,
                metrics,
                self._scrapers.publisher,
                config,
                instance=f"{conf_log.instance_name(config.instance)}.{segment.directory.name}",
                listen=_client_address(config),
                demand=lambda lane: self._admission.demand(lane),
                on_change=lambda: self._admission.pump_all(),
                on_failure=self._on_failure,
            )
        self._admission = AdmissionServer(
            segment, slot, config, hurry=self._scrapers.hurry, turns=self._peers
        )
        self._stuck = StuckWatch(segment, self._scrapers, clock=time.monotonic)
        fleet = Fleet.of(
            segment,
            self._scrapers,
            clock=time.monotonic,
            pause=lambda: gevent.sleep(0),
            instance=conf_log.instance_name(config.instance),
        )
        listeners = inherited(fds) if fds else [open_listener(parse_listen(config.admin_listen))]
        self._server = AdminServer(listeners, make_app(fleet))

    def run(self, generation: int) -> int:
        """Work until told to stop; return the exit code.

        Args:
            generation: `segment.config_generation` as it was before the configuration was read.
        """
        self._generation = generation
        self._server.start()
        self._apply(self._config)
        self._admission.start(self._greenlets.spawn)
        if self._peers is not None:
            self._peers.start()
        self._greenlets.spawn("config", self._watch_config)
        self._greenlets.spawn("reaper", self._reap)
        self._greenlets.spawn("stuck", self._stuck.run)
        self._slot.set_state(SlotState.SERVING)
        LOG.info(
            "coordinator_started",
            extra={
                "admin_listen": self._server.addresses,
                "endpoints": len(self._scrapers),
                "generation": generation,
            },
        )
        self._stop.wait()
        self._slot.set_state(SlotState.DRAINING)
        self._greenlets.stop()
        if self._peers is not None:
            self._peers.stop()
        self._scrapers.stop()
        self._server.stop()
        LOG.info("coordinator_stopped", extra={"failed": self._has_failed})
        return 1 if self._has_failed else 0

    def stop(self) -> None:
        """Have `run` return. Never blocks."""
        self._stop.set()

    def _on_failure(self, _name: str) -> None:
        self._has_failed = True
        self._stop.set()

    def _watch_config(self) -> None:
        while True:
            gevent.sleep(CONFIG_TURN_S)
            generation = self._segment.config_generation
            if generation != self._generation:
                self._generation = generation
                self._reload()
            elif self._is_table_full:
                self._apply(self._config)

    def _reload(self) -> None:
        try:
            config = conf_load.decode(self._segment.read_config())
        except (SegmentMismatch, msgspec.DecodeError) as exc:
            LOG.error("config_not_readable", extra={"reason": str(exc)})
            return
        self._config = config
        self._apply(config)
        LOG.info(
            "config_taken_up",
            extra={"generation": self._generation, "endpoints": len(self._scrapers)},
        )

    def _apply(self, config: Config) -> None:
        """Put a configuration in force; with too few slots, try again each second while requests end."""
        try:
            if self._peers is not None:
                self._peers.apply(config)
            self._scrapers.apply(config, None if self._peers is None else self._peers.caps())
            self._admission.apply(config)
            self._is_table_full = False
        except EndpointTableFull as exc:
            if not self._is_table_full:
                LOG.error("endpoint_table_full", extra={"reason": str(exc)})
            self._is_table_full = True

    def _reap(self) -> None:
        while True:
            gevent.sleep(REAP_TURN_S)
            self._slot.heartbeat(time.monotonic())
            for slot in reap_dead(self._segment):
                self._reaped.inc()
                self._returned.inc(slot.inflight_returned)
                LOG.warning(
                    "slot_reaped",
                    extra={"slot": slot.slot, "dead_pid": slot.pid, "inflight": slot.inflight_returned},
                )


def _client_address(config: Config) -> str:
    """Return where clients reach this instance, with the port that was bound; empty if it is not known."""
    try:
        written = (Path(config.state_dir) / "addresses.json").read_bytes()
        addresses: list[str] = msgspec.json.decode(written)["listen"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return ""
    return addresses[0] if addresses else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator of a segment, as the launcher starts it.

    Args:
        argv: `--segment DIR --fds N,N`; None for the process's own.

    Returns:
        The exit code; see the head of this file.
    """
    given = conf_child.parse_arguments("coordinator", sys.argv[1:] if argv is None else argv)
    try:
        segment = Segment.attach(given.segment)
        conf_child.die_with_parent(segment.launcher_pid)
        generation = segment.config_generation
        config = conf_load.decode(segment.read_config())
    except (SegmentMismatch, msgspec.DecodeError) as exc:
        print(f"coordinator: {exc}", file=sys.stderr)
        return conf_child.EXIT_CANNOT_BOOT
    conf_log.setup("coordinator", config.log, config.instance)
    try:
        slot = WorkerSlot.claim_fixed(segment, FixedSlot.COORDINATOR)
    except NoFreeSlot as exc:
        LOG.error("another_coordinator_runs", extra={"reason": str(exc)})
        return 1
    try:
        try:
            coordinator = Coordinator(segment, slot, config, given.fds)
        except OSError as exc:
            LOG.error("admin_listen_failed", extra={"address": config.admin_listen, "reason": exc.strerror})
            return conf_child.EXIT_CANNOT_BOOT
        for number in (signal.SIGTERM, signal.SIGINT):
            gevent.signal_handler(number, coordinator.stop)
        return coordinator.run(generation)
    finally:
        slot.release()


if __name__ == "__main__":
    sys.exit(main())
