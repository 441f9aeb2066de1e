"""What a worker and the coordinator say to each other about requests that wait.

Each message is a msgpack array behind a length: 4 bytes, big-endian, of what follows. One stream connection
per worker; messages of a connection keep their order. After a reconnection it may be another coordinator:
the worker then says `Enqueue` again for everything that still waits.

    worker       Enqueue  a request begins to wait (its waiter cell is counted already)
                 Cancel   it left: its client went away, or its time was over
                 Taken    the grant has arrived, and the worker's own cells hold the lease now
                 Released something ended that a waiter of the lane may be waiting for
    coordinator  Grant    it may run
                 Refuse   it may not, and why
"""

from __future__ import annotations

import msgspec

LENGTH_BYTES = 4
MESSAGE_MAX_BYTES = 64 * 1024


class Enqueue(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A request begins to wait.

    Attributes:
        id: of this worker's choice, unique among its waiting requests.
        lane: number of its (pool, model).
        band: 0 is the highest.
        tenant: what fairness inside a band goes by.
        enqueued_at: monotonic seconds, of the first time it was enqueued.
        expires_at: monotonic seconds at which waiting ends.
        cost: estimated tokens, for fairness by service.
    """

    id: int
    lane: int
    band: int
    tenant: str
    enqueued_at: float
    expires_at: float
    cost: int = 1


class Cancel(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """A waiting request left."""

    id: int


class Taken(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A grant has arrived and is held by the worker."""

    id: int


class Released(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """A request of a lane ended; sent if somebody waits, and always for fairness by service.

    Attributes:
        lane: number of its (pool, model).
        band: of the request.
        tenant: whose request it was.
        tokens: what it used beyond what was charged when it was granted; may be less than 0.
    """

    lane: int
    band: int = 0
    tenant: str = ""
    tokens: int = 0


class Grant(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """A request may run.

    Attributes:
        id: of the request.
        position: how many stood before it, itself included, when it was enqueued.
    """

    id: int
    position: int = 0


class Refuse(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """A request will not run.

    Attributes:
        id: of the request.
        code: `band_full`, `displaced` or `queue_timeout`.
        retry_after_s: seconds until there may be room, from the queue's drain rate; 0: not soon.
        depth: waiting requests per band of the lane, 0 first.
    """

    id: int
    code: str
    retry_after_s: float
    depth: tuple[int, ...]


FromWorker = Enqueue | Cancel | Taken | Released
FromCoordinator = Grant | Refuse
_encoder = msgspec.msgpack.Encoder()
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode


class WireError(Exception):
    """What came is not of this protocol; drop the connection."""


def encode(message: FromWorker | FromCoordinator) -> bytes:
    """Return a message with its length in front."""
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class Splitter:
    """Cuts a stream of bytes into messages."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was read and return the messages that are whole now.

        Raises:
            WireError: a message is longer than any can be.
        """
        data = self._held + data
        messages = []
        at = 0
        while len(data) - at >= LENGTH_BYTES:
            start = at + LENGTH_BYTES
            length = int.from_bytes(data[at:start], "big")
            if length > MESSAGE_MAX_BYTES:
                raise WireError(f"a message of {length} bytes")
            if len(data) < start + length:
                break
            messages.append(data[start : start + length])
            at = start + length
        self._held = data[at:]
        return messages
