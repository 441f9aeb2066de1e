"""What instances tell each other, and how one tells that another is dead.

A row is written by its instance with every exchange and carries a number that grows. Rules:
    - An instance is *silent* when its number has not changed for `SILENT_S`, by the clock of the one who
      looks, who must have been connected all the time. Clocks are never compared.
    - A silent one's waiters and requests under way are forgotten, but it keeps its share until it is dead:
      it may be cut off from Redis alone and go on with what it has.
    - It is *dead* when it is silent and nobody accepts connections at its address, or when another instance
      has taken that address over. Who gave no address is dead once it is silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

# With the time for a last exchange before, and a look and an exchange after, it is less than 3 s.
SILENT_S = 2.0


class LaneDemand(NamedTuple):
    """What the grant loop knows of a lane, and cells do not.

    Attributes:
        tenants: distinct tenants that wait, by band.
        is_full: the last try to grant failed for the pool's share alone (`Outcome.FULL`).
        could_run: some endpoint would take a request; where none can, other instances need not stand back.
    """

    tenants: tuple[int, ...] = ()
    is_full: bool = False
    could_run: bool = True


class LaneRow(msgspec.Struct, frozen=True, array_like=True):
    """Who waits in a lane.

    Attributes:
        waiters: requests by band that could run somewhere if it were their turn.
        tenants: distinct tenants of those, by band.
        grants: how many waiters got their turn since the coordinator started.
        is_full: the pool's share alone holds them back.
    """

    pool: str
    model: str
    waiters: tuple[int, ...] = ()
    tenants: tuple[int, ...] = ()
    grants: int = 0
    is_full: bool = False


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What an instance tells the others.

    Attributes:
        address: `host:port` where clients connect; empty: none that others could reach.
        inflight: requests under way by endpoint id; zeros left out.
        leases: by pool; zeros left out.
    """

    address: str = ""
    inflight: dict[str, int] = {}
    leases: dict[str, int] = {}
    lanes: tuple[LaneRow, ...] = ()


EMPTY = Row()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Row).decode


def encode(row: Row) -> bytes:
    """Pack a row."""
    return _encode(row)


def decode(data: bytes) -> Row:
    """Unpack a row; one that cannot be read (another version's) says nothing."""
    try:
        return _decode(data)
    except msgspec.DecodeError:
        return EMPTY


@dataclass(frozen=True, slots=True)
class Peer:
    """Another instance, as the ledger shows it.

    Attributes:
        number: of its row.
        shares: what it holds, by pool.
    """

    number: int
    row: Row
    shares: Mapping[str, int]


class Watch:
    """Who of the others is silent."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, numbers: Mapping[str, int], now: float) -> frozenset[str]:
        """Take note of the rows' numbers, and return whose has been the same for too long."""
        seen = self._seen
        for name in seen.keys() - numbers.keys():
            del seen[name]
        for name, number in numbers.items():
            if name not in seen or seen[name][0] != number:
                seen[name] = (number, now)
        return frozenset(name for name, (_, since) in seen.items() if now - since >= SILENT_S)

    def reset(self) -> None:
        """Begin anew, after a time in which nothing was seen."""
        self._seen.clear()


def replaced(silent: Iterable[str], peers: Mapping[str, Peer], own_address: str) -> frozenset[str]:
    """Return those of `silent` whose address belongs to a living instance now."""
    silent = set(silent)
    living = {own_address, *(peer.row.address for name, peer in peers.items() if name not in silent)} - {""}
    return frozenset(name for name in silent if peers[name].row.address in living)
