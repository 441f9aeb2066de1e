"""A worker's connection to the coordinator, for requests that have to wait.

Everything happens in hub callbacks: a grant wakes the request's greenlet at the moment it arrives. While the
coordinator is away waiting requests stay listed here, their time runs on in the worker's sweep, and they are
enqueued again, in their order, once there is a coordinator.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import msgspec
from gevent import monkey

from gateway.channel import ADMITTED, Channel, Parker
from gateway.core import admission_wire as wire
from shm.bands import LeaseRow
from shm.segment import ADMISSION_FILE

READ_BYTES = 65536

_log = logging.getLogger(__name__)
_Socket: type[socket.socket] = monkey.get_original("socket", "socket")


class Waiter:
    """A request that waits for the coordinator's answer.

    Attributes:
        answer: None until it has come. After a `Grant` the lease is in this worker's cells already.
    """

    __slots__ = ("answer", "message", "parker", "pool")

    def __init__(self, message: wire.Enqueue, pool: int, parker: Parker) -> None:
        self.message = message
        self.pool = pool
        self.parker = parker
        self.answer: wire.FromCoordinator | None = None


class AdmissionLink:
    """Sends waiting requests to the coordinator and hands its answers to them."""

    def __init__(self, directory: Path, row: LeaseRow) -> None:
        """Prepare; `tick` connects.

        Args:
            directory: of the segment.
            row: this worker's cells.
        """
        self._path = str(directory / ADMISSION_FILE)
        self._row = row
        self._waiters: dict[int, Waiter] = {}
        self._next_id = 1
        self._channel: Channel | None = None
        self._splitter = wire.Splitter()
        self._unsent = b""

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    def next_id(self) -> int:
        """Return an id for an `Enqueue`."""
        self._next_id += 1
        return self._next_id

    def enqueue(self, message: wire.Enqueue, pool: int, parker: Parker) -> Waiter:
        """Have a request wait; `parker` gets `ADMITTED` when `Waiter.answer` is set."""
        waiter = Waiter(message, pool, parker)
        self._waiters[message.id] = waiter
        if self._channel is None:
            # Now and not at the next tick: other workers' requests would pass this one meanwhile.
            self._connect()
        else:
            self._send(message)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting without an answer."""
        if self._waiters.pop(waiter.message.id, None) is not None:
            self._send(wire.Cancel(waiter.message.id))

    def released(self, lane: int, band: int, tenant: str, tokens: int) -> None:
        """Tell that a waiter of this lane may find room now, and what the tenant has used."""
        self._send(wire.Released(lane, band, tenant, tokens))

    def tick(self, now: float) -> None:
        """For the sweep: connect if there is no connection."""
        if self._channel is None:
            self._connect()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:  # not there yet, or dead: the next tick tries again
            sock.close()
            return
        self._channel = Channel(sock)
        self._splitter = wire.Splitter()
        self._unsent = b""
        self._channel.start_reading(self._on_readable)
        for waiter in sorted(self._waiters.values(), key=lambda each: each.message.enqueued_at):
            self._send(waiter.message)

    def _disconnect(self) -> None:
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        if self._waiters:
            _log.warning("coordinator_lost", extra={"waiting": len(self._waiters)})

    def _send(self, message: wire.FromWorker) -> None:
        channel = self._channel
        if channel is None:
            return  # `_connect` says again what still holds
        self._unsent += wire.encode(message)
        if not channel.writing:
            self._flush()

    def _flush(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            sent = channel.send_some(self._unsent)
        except OSError:
            self._disconnect()
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            channel.start_writing(self._flush)
        else:
            channel.stop_writing()

    def _on_readable(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            data = channel.recv_or_none(READ_BYTES)
            if data is None:
                return
            if not data:
                self._disconnect()
                return
            messages = [wire.decode_from_coordinator(each) for each in self._splitter.feed(data)]
        except (OSError, wire.WireError, msgspec.DecodeError):
            _log.warning("admission_link_broke", exc_info=True)
            self._disconnect()
            return
        for message in messages:
            self._take_answer(message)

    def _take_answer(self, message: wire.FromCoordinator) -> None:
        waiter = self._waiters.pop(message.id, None)
        if waiter is None:
            return  # it has left, and its Cancel is on the way
        if isinstance(message, wire.Grant):
            # First the cells, then the word: at no moment does nobody hold the lease.
            self._row.take(waiter.pool, waiter.message.lane)
            self._send(wire.Taken(message.id))
        waiter.answer = message
        waiter.parker.wake(ADMITTED)
