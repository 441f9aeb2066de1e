"""Instances that share a cap never use more than the cap, whatever happens between them and the ledger.

Messages are lost, late and repeated; instances stop for a while, die, come back; the ledger loses its memory.
A statement is not delivered at once: each of its steps can be the last one before something else happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core.peer_rows import SILENT_S, Watch
from coordinator.core.shares import Need, PoolShare, Statement, plan_shares
from coordinator.ledger import SETTLE_MS
from tests.support.share_ledger import ModelLedger

POOL = "pool"
needs = st.builds(
    Need,
    held=st.integers(0, 20),
    leases=st.integers(0, 20),
    waiters=st.lists(st.integers(0, 30), max_size=3).map(tuple),
    tenants=st.lists(st.integers(0, 5), max_size=3).map(tuple),
)


@given(st.integers(0, 40), st.dictionaries(st.sampled_from("abcde"), needs, min_size=1))
def test_a_plan_gives_the_whole_cap_and_no_more(cap: int, fleet: dict[str, Need]) -> None:
    plan = plan_shares(cap, fleet)
    assert plan.keys() == fleet.keys()
    assert min(plan.values()) >= 0
    assert sum(plan.values()) == cap


@given(st.integers(1, 40), st.dictionaries(st.sampled_from("abcde"), needs, min_size=1))
def test_a_lower_band_gets_nothing_while_a_higher_one_waits_for_its_share(
    cap: int, fleet: dict[str, Need]
) -> None:
    plan = plan_shares(cap, fleet)
    top = {name: need.waiters[0] if need.waiters else 0 for name, need in fleet.items()}
    if any(plan[name] < wants for name, wants in top.items()):
        assert all(plan[name] <= wants for name, wants in top.items())


@dataclass
class Instance:
    """One gateway: its workers' leases, its side of the pool, and how its messages fare."""

    name: str
    share: PoolShare
    leases: int = 0
    waiters: int = 0
    number: int = 0
    watch: Watch = field(default_factory=Watch)
    rows: dict[str, tuple[int, Need]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    awaited: int | None = None


@dataclass(frozen=True)
class Message:
    """A statement on its way, and the dead of whom it tells."""

    sender: str
    number: int
    need: Need
    statement: Statement
    dead: dict[str, int]


class Cluster(RuleBasedStateMachine):
    """Up to four instances on one ledger."""

    @initialize(cap=st.integers(1, 16))
    def start(self, cap: int) -> None:
        self.cap = cap
        self.ledger = ModelLedger()
        self.ledger.now_ms += SETTLE_MS
        self.now = 0.0
        self.numbers = 0
        self.instances: dict[str, Instance] = {}
        self.dead: set[str] = set()
        self.on_the_way: list[Message] = []
        self.rows: dict[str, Need] = {}
        self.unheard: set[str] = set()
        self.has_tried = False
        self.join()
        self.join()

    names = st.integers(0, 3)

    def pick(self, index: int) -> Instance | None:
        living = sorted(self.instances)
        return self.instances[living[index % len(living)]] if living else None

    @precondition(lambda self: len(self.instances) < 4)
    @rule()
    def join(self) -> None:
        self.numbers += 1
        name = f"i{self.numbers}"
        self.instances[name] = Instance(name, PoolShare(self.cap))

    @rule(index=names, count=st.integers(1, 12))
    def arrive(self, index: int, count: int) -> None:
        if instance := self.pick(index):
            started = max(min(count, instance.share.in_force - instance.leases), 0)
            instance.leases += started
            instance.waiters += count - started

    @rule(index=names, count=st.integers(1, 12))
    def finish(self, index: int, count: int) -> None:
        if instance := self.pick(index):
            instance.leases = max(instance.leases - count, 0)
            started = max(min(instance.waiters, instance.share.in_force - instance.leases), 0)
            instance.leases += started
            instance.waiters -= started

    @rule(index=names, tries=st.sampled_from([0, 0, 1, 3]))
    def say(self, index: int, tries: int) -> None:
        """Plan, lower, and send; whatever was awaited is given up.

        Args:
            tries: leases that workers have written down and will take back, since there is no room.
        """
        instance = self.pick(index)
        if instance is None:
            return
        own = Need(instance.share.in_force, instance.leases, (instance.waiters,), (1,))
        # Only who is really dead does not accept connections; a cut-off one does.
        dead = {
            name: instance.rows[name][0]
            for name in instance.silent
            if name in self.dead and name in instance.rows
        }
        known = {name: need for name, (_, need) in instance.rows.items() if name not in dead}
        instance.share.aim(plan_shares(self.cap, {**known, instance.name: own})[instance.name])
        self.number(instance)
        instance.awaited = instance.number
        self.has_tried = self.has_tried or tries > 0
        statement = instance.share.state(instance.leases + tries)
        self.on_the_way.append(Message(instance.name, instance.number, own, statement, dead))

    def number(self, instance: Instance) -> None:
        instance.number = max(instance.number + 1, int(self.now * 1000))

    @rule(order=st.lists(names, min_size=1, max_size=6))
    def exchange(self, order: list[int]) -> None:
        """Some exchanges without trouble."""
        for index in order:
            self.say(index, 0)
            if self.instances:
                self.deliver(-1, answered=True, repeated=False)

    @rule(
        busy=st.lists(st.tuples(names, st.integers(4, 16)), min_size=1, max_size=3),
        order=st.lists(names, min_size=4, max_size=8),
    )
    def flood(self, busy: list[tuple[int, int]], order: list[int]) -> None:
        """More requests than there is room, so that shares have to move while they are in use."""
        for index, count in busy:
            self.arrive(index, count)
        self.exchange(order)

    @precondition(lambda self: self.on_the_way)
    @rule(index=st.integers(0, 9), answered=st.booleans(), repeated=st.booleans())
    def deliver(self, index: int, answered: bool, repeated: bool) -> None:
        """Bring a statement to the ledger, in any order; perhaps twice, perhaps without an answer."""
        message = self.on_the_way.pop(index % len(self.on_the_way))
        if repeated:
            self.on_the_way.append(message)
        held = self.ledger.exchange(message.sender, message.number, {POOL: message.statement}, message.dead)
        self.unheard.discard(message.sender)
        if self.ledger.numbers.get(message.sender, (0, 0))[0] == message.number:
            self.rows[message.sender] = message.need
        sender = self.instances.get(message.sender)
        if answered and sender and sender.awaited == message.number:
            sender.awaited = None
            sender.share.accept(held[POOL])
            self.look(sender)

    def look(self, instance: Instance) -> None:
        others = {name: number for name, (number, _) in self.ledger.numbers.items() if name != instance.name}
        shares = self.ledger.shares[POOL]
        instance.silent = instance.watch.look(others, self.now)
        instance.rows = {
            name: (
                number,
                Need(shares[name], shares[name])
                if name in instance.silent
                else msgspec.structs.replace(self.rows[name], held=shares[name]),
            )
            for name, number in others.items()
        }

    @precondition(lambda self: self.on_the_way)
    @rule(index=st.integers(0, 9))
    def lose(self, index: int) -> None:
        self.on_the_way.pop(index % len(self.on_the_way))

    @rule(index=names)
    def give_up_waiting(self, index: int) -> None:
        """The connection broke: an answer to the last statement is not taken any more."""
        if instance := self.pick(index):
            instance.awaited = None
            instance.watch.reset()
            instance.silent = frozenset()

    @rule(index=names)
    def die(self, index: int) -> None:
        if instance := self.pick(index):
            del self.instances[instance.name]
            self.dead.add(instance.name)
            self.unheard.discard(instance.name)

    @rule(index=names)
    def restart_coordinator(self, index: int) -> None:
        """Its workers go on with what they see; it remembers nothing else."""
        if instance := self.pick(index):
            fresh = Instance(instance.name, PoolShare(self.cap, instance.share.in_force))
            fresh.leases, fresh.waiters = instance.leases, instance.waiters
            fresh.number = instance.number  # from the host's clock, which does not go back
            self.instances[instance.name] = fresh

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, SILENT_S, 3.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass; with a ledger that has lost its memory, not before everyone living has spoken."""
        settled_ms = self.ledger.born_ms + SETTLE_MS
        if self.unheard and self.ledger.now_ms + seconds * 1000 >= settled_ms:
            return
        self.now += seconds
        self.ledger.now_ms += int(seconds * 1000)

    @rule()
    def restart_ledger(self) -> None:
        """All connections break, so that nothing said to the old run reaches the new one."""
        self.ledger.lose_memory()
        self.on_the_way.clear()
        self.rows.clear()
        self.unheard = set(self.instances)
        for instance in self.instances.values():
            instance.awaited = None
            instance.watch.reset()
            instance.silent, instance.rows = frozenset(), {}

    @invariant()
    def never_more_than_the_cap(self) -> None:
        if hasattr(self, "cap"):
            used = sum(max(each.share.in_force, each.leases) for each in self.instances.values())
            assert used <= self.cap

    @invariant()
    def the_ledger_knows_all_that_is_used(self) -> None:
        if hasattr(self, "cap"):
            for name, instance in self.instances.items():
                if name not in self.unheard and name in self.ledger.numbers:
                    held = self.ledger.shares[POOL].get(name, 0)
                    assert held >= max(instance.share.in_force, instance.leases)
            # The last words of a dead instance may come late, and are believed until its silence tells; tries
            # are believed for a moment. That only keeps share from the living.
            shares = self.ledger.shares.get(POOL, {})
            held = sum(share for name, share in shares.items() if name in self.instances)
            assert self.has_tried or held <= self.cap

    def teardown(self) -> None:
        """Whatever happened: with messages that arrive, all of the cap is with those who live, fairly."""
        if not hasattr(self, "cap") or not self.instances:
            return
        self.on_the_way.clear()
        names = sorted(self.instances)
        for instance in self.instances.values():
            instance.leases = min(instance.leases, 0)
            instance.waiters = 0
        for _ in range(12):
            for index in range(len(names)):
                self.say(index, 0)
                self.deliver(-1, answered=True, repeated=False)
            self.wait(0.5)
        shares = [self.instances[name].share.in_force for name in names]
        assert sum(shares) == self.cap
        # Half of an even part is enough.
        assert min(shares) * 2 + 1 >= self.cap // len(names)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
