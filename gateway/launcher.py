"""The parent process of a gateway: `llmgw-gateway`.

It reads the configuration, opens the listeners, makes the shared segment, and starts two children that it
keeps alive: `workers` (gunicorn's arbiter and its workers) and `coordinator`. It serves nothing itself, so it
has little to die of.

Signals
    SIGTERM, SIGINT   stop: workers finish their requests for up to `drain_timeout`; a second one, or
                      SIGQUIT at any time: stop at once
    SIGHUP            read the configuration again; a file that cannot be used changes nothing
    SIGKILL           the kernel sends both children SIGTERM; the next launcher removes the segment

Children are told to drain by SIGTERM and to stop at once by SIGINT. They are process groups of their own, so
that Ctrl-C reaches the launcher alone. Workers whose arbiter died become the launcher's children: it collects
them when they have drained, and ends them if they never do.

Exit codes: 0 stopped as told; 1 could not start, or a child cannot; 2 the configuration cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from conf import child as conf_child
from conf import load as conf_load
from conf import log as conf_log
from conf.compiled import IS_COMPILED
from conf.errors import ConfigError, LlmgwError
from conf.reload import diff
from conf.schema import Config
from conf.values import parse_listen
from conf.version import __version__
from gateway.core.respawn import LONGEST_DELAY_S, Halt, RespawnPolicy
from gateway.listeners import open_listeners, written
from gateway.signals import SignalQueue
from gateway.statedir import StateDir
from shm import segment as shm_segment
from shm.definitions import CONFIG_RELOADS, INFLIGHT_RETURNED, PROCESS_RESTARTS, SLOTS_REAPED
from shm.layout import FixedSlot, Phase, Sizes, SlotState
from shm.metrics import MetricsRow
from shm.rows import WorkerSlot, reap_dead, slots_in_use
from shm.segment import Segment

LOG = logging.getLogger(__name__)

_TURN_S = 1.0  # longest sleep of the main loop
# What a child gets beyond `drain_timeout` before the next stronger signal, in seconds.
_DRAIN_SLACK_S = 10.0
_QUICK_S = 5.0
_COORDINATOR_S = 5.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_FILES_PER_CONNECTION = 2  # the client's, and the engine's


class LaunchError(LlmgwError):
    """The gateway cannot start; the message is for people."""


@dataclass(frozen=True, slots=True)
class Programs:
    """How children are started; the launcher appends `--segment DIR --fds N,N`."""

    workers: tuple[str, ...]
    coordinator: tuple[str, ...]

    @classmethod
    def own(cls) -> Programs:
        """Return this installation's: boot.py of the checkout or of the wheel."""
        root = Path(__file__).resolve().parent.parent
        boot = next(path for path in (root / "boot.py", root / "bin" / "boot.py") if path.exists())
        return cls((sys.executable, str(boot), "workers"), (sys.executable, str(boot), "coordinator"))


@dataclass(slots=True)
class Child:
    """A child process through all its lives.

    Attributes:
        name: `workers` or `coordinator`.
        command: program and arguments.
        fds: listeners it inherits.
        process: the life that runs; None between lives.
        started_at: monotonic seconds, start of the last life.
        due_at: monotonic seconds, when the next life begins; None while one runs.
    """

    name: str
    command: tuple[str, ...]
    fds: tuple[int, ...]
    policy: RespawnPolicy = field(default_factory=RespawnPolicy)
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float | None = 0.0


class Launcher:
    """A started launcher: listeners open, segment made, no child yet."""

    def __init__(
        self, config_path: Path | None, config: Config, programs: Programs, signals: SignalQueue
    ) -> None:
        """Take the state_dir, the addresses and shared memory.

        Raises:
            LlmgwError: one of them cannot be had; what was taken is given back.
        """
        self._config_path = config_path
        self._config = config  # the newest good one; keys that need a restart keep their first values
        self._signals = signals
        self._orphans: dict[int, float] = {}  # adopted processes, and when they are ended (monotonic seconds)
        self._state = StateDir(Path(config.state_dir))
        self._segment: Segment | None = None
        self._slot: WorkerSlot | None = None
        self._listeners: list[socket.socket] = []
        try:
            client = self._open(config.listen, "listen")
            admin = self._open(config.admin_listen, "admin_listen")
            self._segment = self._make_segment()
            self._slot = WorkerSlot.claim_fixed(self._segment, FixedSlot.LAUNCHER)
            self._metrics = MetricsRow(self._segment, self._slot)
            self._segment.publish_config(conf_load.encode(config))
            self._state.write_pid()
            self._state.write_addresses([written(each) for each in client], written(admin[0]))
        except BaseException:
            self._give_back()
            raise
        self._addresses = [written(each) for each in client]
        self._admin_address = written(admin[0])
        # The coordinator starts first and ends last: workers want its table.
        self._coordinator = self._child("coordinator", programs.coordinator, admin)
        self._workers = self._child("workers", programs.workers, client)

    def run(self) -> int:
        """Keep the children alive until told to stop, then stop them and give everything back.

        Returns:
            The exit code.
        """
        LOG.info(
            "gateway_started",
            extra={
                "version": __version__,
                "compiled": IS_COMPILED,
                "listen": self._addresses,
                "admin_listen": self._admin_address,
                "workers": self._config.workers,
                "segment": str(self._segment_in_use.directory),
                "config": str(self._config_path or "environment"),
            },
        )
        self._slot_in_use.set_state(SlotState.SERVING)
        code, quick = 1, True
        try:
            stop = self._keep_alive()
            code, quick = (1, False) if stop is None else (0, stop == signal.SIGQUIT)
        except Exception:
            LOG.exception("launcher_failed")
        finally:
            self._shut_down(quick=quick)
        LOG.info("gateway_stopped", extra={"exit_code": code})
        return code

    def _keep_alive(self) -> int | None:
        """Run the main loop; return the signal that ended it, None if a child cannot boot."""
        while True:
            now = time.monotonic()
            for child in (self._coordinator, self._workers):
                if child.due_at is not None and child.due_at <= now:
                    self._start(child, now)
            self._slot_in_use.heartbeat(now)
            self._end_orphans(now)
            for number in self._signals.wait(self._pause(now)):
                if number in _STOPS:
                    return number
                if number == signal.SIGHUP:
                    self._reload()
            if not self._collect(respawn=True):
                return None

    def _pause(self, now: float) -> float:
        dues = (
            child.due_at - now for child in (self._coordinator, self._workers) if child.due_at is not None
        )
        return min([_TURN_S, *dues])

    def _child(self, name: str, command: tuple[str, ...], listeners: Sequence[socket.socket]) -> Child:
        fds = tuple(each.fileno() for each in listeners)
        whole = (*command, "--segment", str(self._segment_in_use.directory), "--fds", ",".join(map(str, fds)))
        return Child(name, whole, fds)

    def _start(self, child: Child, now: float) -> None:
        try:
            child.process = subprocess.Popen(
                child.command, stdin=subprocess.DEVNULL, pass_fds=child.fds, process_group=0
            )
        except OSError as exc:  # no process or no memory to be had: for now, one hopes
            LOG.error("child_not_started", extra={"child": child.name, "reason": exc.strerror})
            child.due_at = now + LONGEST_DELAY_S
            return
        child.started_at = now
        child.due_at = None
        LOG.info("child_started", extra={"child": child.name, "child_pid": child.process.pid})

    def _collect(self, *, respawn: bool) -> bool:
        """Take notice of every process that ended; return False if one of the children cannot boot."""
        collected = False
        halt = False
        while (pid := _next_ended()) is not None:
            collected = True
            child = next(
                (c for c in (self._coordinator, self._workers) if c.process and c.process.pid == pid), None
            )
            if child is None:
                os.waitpid(pid, 0)
                self._orphans.pop(pid, None)
            else:
                halt |= not self._ended(child, respawn=respawn)
        if collected:
            # The coordinator does this four times a second; here it costs little, and works without one.
            for slot in reap_dead(self._segment_in_use):
                self._metrics.counter(SLOTS_REAPED).inc()
                self._metrics.counter(INFLIGHT_RETURNED).inc(slot.inflight_returned)
                LOG.info(
                    "slot_reaped",
                    extra={"slot": slot.slot, "dead_pid": slot.pid, "inflight": slot.inflight_returned},
                )
        return not halt

    def _ended(self, child: Child, *, respawn: bool) -> bool:
        assert child.process is not None
        code = child.process.wait()
        now = time.monotonic()
        lived_s = now - child.started_at
        facts = {
            "child": child.name,
            "child_pid": child.process.pid,
            "exit": _spell(code),
            "lived_s": round(lived_s, 3),
        }
        child.process = None
        if not respawn:
            LOG.info("child_stopped", extra=facts)
            return True
        verdict = child.policy.died(code, lived_s)
        if isinstance(verdict, Halt):
            LOG.error("child_cannot_start", extra=facts)
            print(f"llmgw-gateway: {child.name} cannot start; the lines above say why", file=sys.stderr)
            return False
        child.due_at = now + verdict.delay_s
        level = logging.ERROR if verdict.delay_s else logging.WARNING
        LOG.log(level, "child_exited", extra={**facts, "restart_in_s": verdict.delay_s})
        self._metrics.counter(PROCESS_RESTARTS, (child.name,)).inc()
        return True

    def _end_orphans(self, now: float) -> None:
        """Give workers whose arbiter died as long as a drain takes, then end them."""
        for pid in self._adopted():
            deadline = self._orphans.setdefault(pid, now + self._config.drain_timeout + _DRAIN_SLACK_S)
            if now >= deadline:
                LOG.warning("orphan_killed", extra={"orphan_pid": pid})
                _kill(pid, signal.SIGKILL)

    def _reload(self) -> None:
        try:
            new = conf_load.load(self._config_path)
        except ConfigError as exc:
            for problem in exc.problems:
                LOG.error("config_refused", extra={"problem": str(problem)})
            self._metrics.counter(CONFIG_RELOADS, ("refused",)).inc()
            return
        plan = diff(self._config, new)
        kept = {key.split(".")[0] for key in plan.needs_restart}
        # A child that restarts reads the published copy: it must find there what the launcher has set up.
        new = msgspec.structs.replace(new, **{key: getattr(self._config, key) for key in kept})
        try:
            generation = self._segment_in_use.publish_config(conf_load.encode(new))
        except OSError as exc:
            LOG.error("config_refused", extra={"problem": f"shared memory cannot be written: {exc.strerror}"})
            self._metrics.counter(CONFIG_RELOADS, ("refused",)).inc()
            return
        self._config = new
        self._metrics.counter(CONFIG_RELOADS, ("ok",)).inc()
        changed = [key for key in plan.changed if key not in plan.needs_restart]
        LOG.info("config_reloaded", extra={"changed": changed, "generation": generation})
        if plan.needs_restart:
            LOG.warning("config_needs_restart", extra={"keys": list(plan.needs_restart)})

    def _shut_down(self, *, quick: bool) -> None:
        LOG.info("gateway_stopping", extra={"quick": quick, "drain_timeout_s": self._config.drain_timeout})
        self._segment_in_use.set_phase(Phase.DRAINING)
        self._slot_in_use.set_state(SlotState.DRAINING)
        drain = [] if quick else [(signal.SIGTERM, self._config.drain_timeout + _DRAIN_SLACK_S)]
        self._end(self._worker_pids, [*drain, (signal.SIGINT, _QUICK_S), (signal.SIGKILL, _QUICK_S)])
        self._end(self._coordinator_pids, [(signal.SIGTERM, _COORDINATOR_S), (signal.SIGKILL, _QUICK_S)])
        self._give_back()

    def _end(self, pids: Callable[[], set[int]], stages: Iterable[tuple[signal.Signals, float]]) -> None:
        """Send ever stronger signals until no process is left; a stop signal skips to the next."""
        for number, patience_s in stages:
            deadline = time.monotonic() + patience_s
            told: set[int] = set()
            while alive := pids():
                for pid in alive - told:  # new ones come in when an arbiter dies and leaves its workers
                    _kill(pid, number)
                told |= alive
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    LOG.warning("stop_took_too_long", extra={"signal": number.name, "patience_s": patience_s})
                    break
                got = self._signals.wait(min(left_s, _TURN_S))
                self._collect(respawn=False)
                if any(each in _STOPS for each in got):
                    break
            else:
                return

    def _worker_pids(self) -> set[int]:
        return _pid_of(self._workers) | self._adopted()

    def _coordinator_pids(self) -> set[int]:
        return _pid_of(self._coordinator)

    def _adopted(self) -> set[int]:
        """Return the ids of living workers whose parent is this process, because their arbiter died."""
        workers = self._segment_in_use.layout.sizes.worker_slots
        pids = {view.pid for view in slots_in_use(self._segment_in_use) if view.slot < workers}
        return {pid for pid in pids if _parent_of(pid) == os.getpid()}

    @property
    def _segment_in_use(self) -> Segment:
        assert self._segment is not None
        return self._segment

    @property
    def _slot_in_use(self) -> WorkerSlot:
        assert self._slot is not None
        return self._slot

    def _open(self, text: str, key: str) -> list[socket.socket]:
        opened = open_listeners(
            parse_listen(text), key, on_wait=lambda: LOG.warning("address_taken_waiting", extra={key: text})
        )
        self._listeners += opened
        return opened

    def _make_segment(self) -> Segment:
        directory = self._state.next_segment()
        try:
            return Segment.create(directory, Sizes.for_workers(self._config.workers))
        except OSError as exc:
            raise LaunchError(f"cannot make the shared segment {directory}: {exc.strerror}") from exc

    def _give_back(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._slot is not None:
            self._slot.release()
        if self._segment is not None:
            self._segment.close()
            shm_segment.remove(self._segment.directory)
        self._state.close()


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> int:
    """Start a gateway and stay until it is told to stop.

    Args:
        argv: arguments without the program's name; None for the process's own.
        programs: how to start children; None for this installation's own.

    Returns:
        The exit code; see the head of this file.
    """
    given = _arguments(argv)
    path = None if given.config is None else given.config.absolute()
    try:
        config = conf_load.load(path)
    except ConfigError as exc:
        for problem in exc.problems:
            print(problem, file=sys.stderr)
        if path is None and not any(problem.key.startswith("GATEWAY_") for problem in exc.problems):
            print(
                "llmgw-gateway: no file was given; name one with --config FILE, or set GATEWAY_UPSTREAM_URL",
                file=sys.stderr,
            )
        return 2
    conf_log.setup("launcher", config.log, config.instance)
    signals = SignalQueue((*_STOPS, signal.SIGHUP, signal.SIGCHLD))
    try:
        conf_child.adopt_orphans()
        _raise_file_limit(config)
        launcher = Launcher(path, config, programs or Programs.own(), signals)
        return launcher.run()
    except LlmgwError as exc:
        print(f"llmgw-gateway: {exc}", file=sys.stderr)
        return 1
    finally:
        signals.close()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "llmgw-gateway",
        description="OpenAI-compatible gateway for vLLM, SGLang and llama.cpp engines.",
        epilog="SIGTERM or Ctrl-C stops after running requests have ended, twice at once. SIGHUP reads FILE "
        "again. Every key of FILE can be given as a variable as well: LLMGW_ROUTER__RETRIES=3. Without FILE, "
        "GATEWAY_UPSTREAM_URL=http://HOST:PORT makes a plain proxy with a priority queue in front of that.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (YAML)")
    parser.add_argument("--version", action="version", version=f"llmgw {__version__}")
    return parser.parse_args(argv)


def _raise_file_limit(config: Config) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = config.max_connections * _FILES_PER_CONNECTION
    if hard != resource.RLIM_INFINITY and hard < wanted:
        LOG.warning("open_files_limited", extra={"limit": hard, "max_connections_wants": wanted})


def _next_ended() -> int | None:
    """Return the id of a child that ended and was not waited for yet; leaves it so."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended else None


def _pid_of(child: Child) -> set[int]:
    return {child.process.pid} if child.process else set()


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The program's name, in brackets, may contain anything; the state and the parent follow the last bracket.
    return int(stat[stat.rindex(b")") + 2 :].split()[1])


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        LOG.debug("already_gone", extra={"gone_pid": pid})


def _spell(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


if __name__ == "__main__":
    sys.exit(main())
