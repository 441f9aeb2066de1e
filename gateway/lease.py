"""When a request may run, on the worker's side: the fast path, the wait, and the lease given back once.

Fast path: nobody of the same or a higher band waits, the lane is below the band's ceiling and the pool below
its cap: the worker takes the lease in its own cells. Otherwise the coordinator queues the request and grants
it. How leases stay exact without a lock: `shm.bands`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from conf.schema import Config
from gateway.admission_link import AdmissionLink, Waiter
from gateway.channel import ADMITTED, CLIENT_GONE, TIMEOUT
from gateway.connection import FOREVER, ClientClosed, ClientConnection
from gateway.core import admission, errors
from gateway.core import admission_wire as wire
from gateway.routing import Lane
from shm.bands import BandCells, LeaseRow, barrier

COORDINATOR_GRACE_S = 0.5
"""Beyond a request's time in the queue: how long the coordinator may take to say that it is over."""


class Lease:
    """The right to run one request in a lane. Given back exactly once, whatever becomes of the request."""

    __slots__ = ("_admission", "_band", "_charged", "_is_dispatched", "_is_held", "_lane", "_tenant")

    def __init__(self, owner: WorkerAdmission, lane: Lane, band: int, tenant: str, charged: int = 0) -> None:
        """Hold what stands in the worker's cells already.

        Args:
            charged: tokens for which the tenant has been charged; fairness by service.
        """
        self._admission = owner
        self._lane = lane
        self._band = band
        self._tenant = tenant
        self._charged = charged
        self._is_held = True
        self._is_dispatched = False

    def dispatched(self) -> None:
        """The request is counted in flight at an endpoint from now on."""
        if not self._is_dispatched:
            self._is_dispatched = True
            self._admission.row.dispatched(self._lane.number)

    def undispatched(self) -> None:
        """It is not any more, and another endpoint of the lane is to be tried."""
        if self._is_dispatched:
            self._is_dispatched = False
            self._admission.row.undispatched(self._lane.number)

    def release(self, tokens: int = 0) -> None:
        """Give the lease back; a second call does nothing.

        Args:
            tokens: what the request used, for fairness by service.
        """
        if not self._is_held:
            return
        self._is_held = False
        row, lane = self._admission.row, self._lane
        if self._is_dispatched:
            row.give_back(lane.pool_slot)
        else:
            row.take_back(lane.pool_slot, lane.number)
        self._admission.note_release(lane, self._band, self._tenant, tokens - self._charged)


class WorkerAdmission:
    """Admits the requests of one worker.

    Attributes:
        row: the worker's cells.
    """

    def __init__(self, cells: BandCells, row: LeaseRow, link: AdmissionLink) -> None:
        self.row = row
        self._cells = cells
        self._link = link
        self._tick = 0

    def try_start(self, lane: Lane, band: int, tenant: str, now: float) -> Lease | None:
        """Take the fast path, if it is open; never blocks."""
        row, cells = self.row, self._cells
        row.take(lane.pool_slot, lane.number)
        barrier()
        self._tick += 1
        view = admission.LaneView(
            admission.Replicas._make(lane.endpoints.read()),
            cells.waiters(lane.number),
            cells.pending(lane.number) - 1,
            cells.leases(lane.pool_slot) - 1,
            cells.cap(lane.pool_slot),
        )
        verdict = admission.may_start(view, band, lane.settings, now, tick=self._tick)
        # With no replica that could run it, scheduling says so better than a queue would.
        is_open = verdict.starts or verdict.outcome is admission.Outcome.NO_REPLICA
        if is_open and (view.cap == admission.NO_CAP or not self._others_wait(lane, band)):
            return Lease(self, lane, band, tenant)
        row.take_back(lane.pool_slot, lane.number)
        return None

    def _others_wait(self, lane: Lane, band: int) -> bool:
        """Whether another model's requests of this band or above wait for the same cap: they come first."""
        waiters = self._cells.waiters
        return any(any(waiters(other)[: band + 1]) for other in lane.of_pool if other != lane.number)

    def free_lease(self, lane: Lane, band: int, tenant: str) -> Lease:
        """Take a lease without asking: admission is off."""
        self.row.take(lane.pool_slot, lane.number)
        return Lease(self, lane, band, tenant)

    def wait(
        self,
        connection: ClientConnection,
        lane: Lane,
        band: int,
        tenant: str,
        *,
        config: Config,
        cost: int,
        ping_s: float,
        on_silence: Callable[[], None],
    ) -> tuple[Lease, int]:
        """Wait for the coordinator's grant; blocks the greenlet.

        Args:
            ping_s: seconds of waiting after which `on_silence` is called, again and again.

        Returns:
            The lease, and the place in the queue at which the request began.

        Raises:
            errors.QueueFull, errors.Displaced, errors.QueueTimeout: it may not run.
            errors.ShuttingDown: the worker's drain time-out is over.
            ClientClosed: the client left.
        """
        now = time.monotonic()
        ttl = config.router.admission.queue_ttl
        expires_at = now + ttl if ttl else FOREVER
        message = wire.Enqueue(self._link.next_id(), lane.number, band, tenant, now, expires_at, cost)
        self.row.add_waiter(lane.number, band, 1)
        waiter = None
        try:
            waiter = self._link.enqueue(message, lane.pool_slot, connection.parker)
            self._park(connection, waiter, expires_at, ping_s, on_silence)
        except BaseException:
            if waiter is not None:
                if isinstance(waiter.answer, wire.Grant):  # it came in the same turn
                    Lease(self, lane, band, tenant, cost).release()
                else:
                    self._link.leave(waiter)
            raise
        finally:
            self.row.add_waiter(lane.number, band, -1)
        answer = waiter.answer
        if isinstance(answer, wire.Grant):
            return Lease(self, lane, band, tenant, cost), answer.position
        assert answer is not None
        raise _refusal(answer, config, lane)

    def _park(
        self,
        connection: ClientConnection,
        waiter: Waiter,
        expires_at: float,
        ping_s: float,
        on_silence: Callable[[], None],
    ) -> None:
        ping_at = time.monotonic() + ping_s
        while waiter.answer is None:
            # The coordinator refuses in time, and knows more to say; here it is for when there is none.
            connection.deadline = min(expires_at + COORDINATOR_GRACE_S, ping_at)
            bits = connection.parker.park()
            if bits & CLIENT_GONE or connection.gone:
                raise ClientClosed
            if bits & ADMITTED:
                continue
            if connection.shutdown:
                raise errors.ShuttingDown()
            if bits & TIMEOUT:
                now = time.monotonic()
                if now >= expires_at + COORDINATOR_GRACE_S:
                    raise errors.QueueTimeout()
                if now >= ping_at:
                    on_silence()
                    ping_at = now + ping_s
        connection.deadline = FOREVER

    def note_release(self, lane: Lane, band: int, tenant: str, tokens: int) -> None:
        """Tell the coordinator, if somebody in the pool may wait for what was given back, or if it counts."""
        barrier()
        if not self._link.is_connected:
            return
        if (tokens and lane.settings.charges_service) or self._cells.anybody_waits(lane.of_pool):
            self._link.released(lane.number, band, tenant, tokens)


def _refusal(answer: wire.FromCoordinator, config: Config, lane: Lane) -> errors.ApiError:
    assert isinstance(answer, wire.Refuse)
    if answer.code == "no_endpoint":
        return errors.NoEndpoint(lane.records[0].model)
    names = [band.name for band in config.router.admission.bands_by_rank]
    queue = {"depth": dict(zip(names, answer.depth, strict=False))}
    if answer.code == "queue_timeout":
        return errors.QueueTimeout(retry_after=answer.retry_after_s, queue=queue)
    if answer.code == "runner_stuck":
        return errors.RunnerStuck(retry_after=answer.retry_after_s, queue=queue)
    if answer.code == "displaced":
        return errors.Displaced(retry_after=answer.retry_after_s, queue=queue)
    return errors.QueueFull(retry_after=answer.retry_after_s, queue=queue)
