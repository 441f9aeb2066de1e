"""Whatever comes, leaves and waits too long, in whatever order: bands, turns, capacity and TTL hold.

A state machine drives the queue beside a model that looks at every waiter each time.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core.queue import BandFull, BandQueue, QueueSettings, Waiter

BANDS = 4
TENANTS = ["a", "b", "c", "d", "e"]


class QueueMachine(RuleBasedStateMachine):
    """Enqueue, cancel, grant, expire, restart."""

    @initialize(per_band=st.integers(1, 6), total=st.integers(1, 12))
    def begin(self, per_band: int, total: int) -> None:
        self.now = 1000.0
        self.limits = QueueSettings(bands=BANDS, capacity_per_band=per_band, capacity=total)
        self.queue = BandQueue(self.limits, self.now)
        self.model: list[Waiter] = []  # as they came
        self.rotation: list[list[str]] = [[] for _ in range(BANDS)]  # first whose turn it is
        # (band, tenant that waits) -> grants to each other tenant since it was served or began to wait.
        self.passed_by: dict[tuple[int, str], Counter[str]] = {}
        self.came: list[int] = []
        self.left: list[int] = []

    # What the model does.

    def model_add(self, waiter: Waiter) -> None:
        self.model.append(waiter)
        if waiter.tenant not in self.rotation[waiter.band]:
            self.rotation[waiter.band].append(waiter.tenant)
            self.passed_by[waiter.band, waiter.tenant] = Counter()

    def model_remove(self, waiter: Waiter) -> None:
        self.model.remove(waiter)
        if not self.of(waiter.band, waiter.tenant):
            self.rotation[waiter.band].remove(waiter.tenant)
            del self.passed_by[waiter.band, waiter.tenant]

    def of(self, band: int, tenant: str | None = None) -> list[Waiter]:
        """Return the waiters of a band, or of a tenant in it, first who came first."""
        mine = [w for w in self.model if w.band == band and tenant in (None, w.tenant)]
        return sorted(mine, key=lambda w: w.enqueued_at)  # stable: equal times as they came

    def leave(self, waiter: Waiter) -> None:
        self.model_remove(waiter)
        self.left.append(waiter.id)

    # What happens.

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        band=st.integers(0, BANDS - 1),
        tenant=st.sampled_from(TENANTS),
        waited_s=st.sampled_from([0.0, 0.0, 0.0, 1.0, 5.0]),
        ttl_s=st.sampled_from([0.0, 2.0, 10.0, 10.0, 30.0]),
    )
    def somebody_comes(self, band: int, tenant: str, waited_s: float, ttl_s: float) -> None:
        waiter = Waiter(len(self.came), band, tenant, self.now - waited_s, self.now + ttl_s)
        self.came.append(waiter.id)
        is_full = len(self.of(band)) >= self.limits.capacity_per_band
        lower = [each for each in range(BANDS - 1, band, -1) if self.of(each)]
        if is_full or (len(self.model) >= self.limits.capacity and not lower):
            with pytest.raises(BandFull):
                self.queue.enqueue(waiter, self.now)
            self.left.append(waiter.id)
            return
        displaced = self.queue.enqueue(waiter, self.now)
        if len(self.model) < self.limits.capacity:
            assert displaced is None
        else:
            assert displaced == self.of(lower[0])[-1]
            self.leave(displaced)
        self.model_add(waiter)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def somebody_comes_twice(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.model))
        assert self.queue.enqueue(waiter, self.now) is None

    @rule(data=st.data())
    def somebody_goes(self, data: st.DataObject) -> None:
        if not self.came:
            return
        waiter_id = data.draw(st.sampled_from(self.came))
        waiting = [waiter for waiter in self.model if waiter.id == waiter_id]
        cancelled = self.queue.cancel(waiter_id, self.now)
        assert [cancelled] == (waiting or [None])
        if cancelled is not None:
            self.leave(cancelled)

    @rule()
    def time_is_over(self) -> None:
        expired = self.queue.expire(self.now)
        assert len(set(expired)) == len(expired)
        assert set(expired) == {waiter for waiter in self.model if waiter.ttl_until <= self.now}
        for waiter in expired:
            self.leave(waiter)

    @rule(gate=st.integers(0, BANDS))
    def somebody_may_run(self, gate: int) -> None:
        """Grant where the bands above `gate` may start."""
        asked: list[int] = []

        def may_start(band: int) -> bool:
            asked.append(band)
            return band < gate

        granted = self.queue.grant_next(may_start, self.now)
        top = min((waiter.band for waiter in self.model), default=None)
        assert asked == ([] if top is None else [top])
        if top is None or top >= gate:
            assert granted is None
            return
        turn = self.rotation[top][0]
        first = self.of(top, turn)[0]
        if first.ttl_until <= self.now:
            assert granted is None
            return
        assert granted == first
        self.rotation[top].remove(turn)
        self.rotation[top].append(turn)
        self.passed_by[top, turn].clear()
        self.leave(granted)
        # A tenant that waits sees every other one served once at most before its own turn.
        for (band, tenant), others in self.passed_by.items():
            if band == top and tenant != turn:
                others[turn] += 1
                assert others[turn] == 1

    @rule(seed=st.integers(0, 3))
    def coordinator_restarts(self, seed: int) -> None:
        """Workers tell a new queue what waits, each as soon as it reconnects."""
        told = list(self.model)
        random.Random(seed).shuffle(told)
        self.queue = BandQueue(self.limits, self.now)
        self.model, self.rotation, self.passed_by = [], [[] for _ in range(BANDS)], {}
        for waiter in told:
            assert self.queue.enqueue(waiter, self.now) is None
            self.model_add(waiter)

    # What must hold at any moment.

    @invariant()
    def nobody_is_lost_or_leaves_twice(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert sorted(self.left + [waiter.id for waiter in self.model]) == self.came
        assert {waiter.id for waiter in self.queue} == {waiter.id for waiter in self.model}
        self.queue.check()

    @invariant()
    def no_queue_is_longer_than_it_may_be(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert max(self.queue.depths()) <= self.limits.capacity_per_band
        assert len(self.queue) <= self.limits.capacity


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(
    backlog=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_a_tenant_with_few_waiters_is_served_in_as_many_rounds(
    backlog: list[int], order: random.Random
) -> None:
    """The k-th waiter of a tenant is granted within k rounds, however many waiters the others have."""
    comers = [tenant for tenant, count in enumerate(backlog) for _ in range(count)]
    order.shuffle(comers)
    queue = BandQueue(QueueSettings(bands=1), 0.0)
    for number, tenant in enumerate(comers):
        queue.enqueue(Waiter(number, 0, f"tenant-{tenant}", float(number), 1e9), float(number))
    granted = [queue.grant_next(lambda _: True, 1000.0) for _ in comers]
    served: Counter[str] = Counter()
    for number, waiter in enumerate(granted, 1):
        assert waiter is not None
        served[waiter.tenant] += 1
        turn = served[waiter.tenant]
        assert number <= sum(min(count, turn) for count in backlog)
    assert served == {f"tenant-{tenant}": count for tenant, count in enumerate(backlog)}


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["come", "come", "grant", "grant", "cancel"]),
            st.integers(0, 5),
            st.sampled_from([1.0, 10.0, 500.0]),
            st.sampled_from([0.0, 1.0, 30.0, 300.0, 10_000.0]),
        ),
        max_size=80,
    )
)
def test_by_service_whoever_attained_least_of_late_is_next(
    events: list[tuple[str, int, float, float]],
) -> None:
    queue = BandQueue(QueueSettings(bands=1, fairness="service"), 0.0)
    now, charges = 0.0, []

    def attained(tenant: str) -> float:
        return sum(cost * 0.5 ** ((now - at) / 60.0) for who, cost, at in charges if who == tenant)

    for number, (event, tenant, cost, seconds) in enumerate(events):
        now += seconds
        queue.expire(now)  # forgets now and then
        if event == "come":
            queue.enqueue(Waiter(number, 0, f"t{tenant}", now, 1e12, cost), now)
        elif event == "cancel":
            ids = sorted(waiter.id for waiter in queue)
            if ids:
                queue.cancel(ids[tenant % len(ids)], now)
        else:
            waiting = {waiter.tenant for waiter in queue}
            waiter = queue.grant_next(lambda _: True, now)
            assert (waiter is None) == (not waiting)
            if waiter is not None:
                # What has faded below a token is forgotten.
                assert attained(waiter.tenant) <= min(map(attained, waiting)) + 1.001
                charges.append((waiter.tenant, waiter.cost, now))
        queue.check()


@given(
    waiters=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), min_size=1, max_size=25),
    grants=st.integers(0, 10),
)
def test_a_place_is_the_number_of_grants_until_ones_own(waiters: list[tuple[int, str]], grants: int) -> None:
    queue = BandQueue(QueueSettings(bands=3), 0.0)
    for number, (band, tenant) in enumerate(waiters):
        queue.enqueue(Waiter(number, band, tenant, float(number), 1e9), 0.0)
    for _ in range(grants):
        queue.grant_next(lambda _: True, 1.0)
    places = {waiter.id: queue.place(waiter.id) for waiter in queue}
    for number in range(1, len(places) + 1):
        waiter = queue.grant_next(lambda _: True, 1.0)
        assert waiter is not None
        assert places[waiter.id] == number
