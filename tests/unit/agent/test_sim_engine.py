"""The simulated engine's batch, queue and timings, on a clock that stands still."""

from __future__ import annotations

import pytest

from agent.sim.engine import Engine, State, Timing, Work
from agent.sim.prompt import make_prompt
from tests.support.clock import FakeClock

TIMING = Timing(ttft_s=0.1, itl_s=0.02)


class Bench:
    """An engine, its clock, and the loop around it."""

    def __init__(self, timing: Timing = TIMING, *, seqs: int = 4, blocks: int = 1000) -> None:
        self.clock = FakeClock()
        self.engine = Engine(timing, max_num_seqs=seqs, num_blocks=blocks, block_size=16)

    def work(self, tokens: int = 40, steps: int = 3, salt: int = 0, **options: object) -> Work:
        sink = _Sink(self)
        return Work(make_prompt(b"abcd" * tokens, 16, salt), steps, sink, **options)  # type: ignore[arg-type]

    def submit(self, tokens: int = 40, steps: int = 3, salt: int = 0, **options: object) -> Work:
        work = self.work(tokens, steps, salt, **options)
        self.engine.submit(work, self.clock())
        return work

    def run(self, until: float) -> None:
        """Let time pass to `until` seconds after the start, stopping wherever something is due."""
        end = 1000.0 + until
        while True:
            due = self.engine.next_due(self.clock())
            if due is None or self.clock() + due > end:
                break
            self.clock.advance(due)
            for work in self.engine.step(self.clock()):
                work.sink.on_step(work)
            self.engine.pool.check()
        self.clock.advance(end - self.clock())


class _Sink:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.heard: list[tuple[float, int]] = []

    def on_step(self, work: Work) -> None:
        self.heard.append((self._bench.clock() - 1000.0, work.produced))


def heard(work: Work) -> list[tuple[float, int]]:
    assert isinstance(work.sink, _Sink)
    return work.sink.heard


def times(work: Work) -> list[float]:
    return [at for at, _ in heard(work)]


def test_tokens_come_after_ttft_and_then_at_intervals() -> None:
    bench = Bench()
    work = bench.submit(steps=4)
    bench.run(1.0)
    assert [produced for _, produced in heard(work)] == [1, 2, 3, 4]
    assert times(work) == pytest.approx([0.1, 0.12, 0.14, 0.16], abs=0.001)
    assert work.state is State.COMPLETED


def test_token_is_never_early() -> None:
    bench = Bench(Timing(ttft_s=0.0123, itl_s=0.0077))
    work = bench.submit(steps=50)
    bench.run(1.0)
    due = [0.0123 + 0.0077 * step for step in range(50)]
    assert all(at >= wanted - 1e-9 for at, wanted in zip(times(work), due, strict=True))
    assert times(work) == pytest.approx(due, abs=0.001)


def test_uncached_tokens_delay_the_first_token_and_cached_ones_do_not() -> None:
    bench = Bench(Timing(prefill_s_per_token=0.001))
    first = bench.submit(tokens=160, steps=1)
    bench.run(1.0)
    second = bench.submit(tokens=160, steps=1)
    bench.run(2.0)
    assert times(first) == pytest.approx([0.16], abs=0.001)
    # The last of its 10 blocks is computed again, as the last token must be.
    assert times(second) == pytest.approx([1.016], abs=0.001)
    assert second.cached_tokens(16) == 144


def test_whole_answer_comes_when_its_last_token_would() -> None:
    bench = Bench()
    work = bench.submit(steps=6, is_stepwise=False)
    bench.run(1.0)
    assert heard(work) == [(pytest.approx(0.2, abs=0.001), 6)]
    assert bench.engine.counts.generation_tokens == 6


def test_slow_factors_multiply() -> None:
    bench = Bench(Timing(ttft_s=0.01, itl_s=0.01, slow_factor=2))
    work = bench.submit(steps=2, slow_factor=5.0)
    bench.run(1.0)
    assert times(work) == pytest.approx([0.1, 0.2], abs=0.001)


def test_work_without_delay_is_due_at_once_one_token_a_step() -> None:
    bench = Bench(Timing())
    work = bench.submit(steps=3)
    assert bench.engine.next_due(bench.clock()) == 0.0
    assert [len(bench.engine.step(bench.clock())) for _ in range(4)] == [1, 1, 1, 0]
    assert work.state is State.COMPLETED


def test_queue_is_first_in_first_out() -> None:
    bench = Bench(seqs=1)
    works = [bench.submit(steps=2) for _ in range(3)]
    assert (bench.engine.running, bench.engine.waiting) == (1, 2)
    bench.run(1.0)
    # The second begins when the first is done: at 0.12.
    assert [times(work)[0] for work in works] == pytest.approx([0.1, 0.22, 0.34], abs=0.003)


def test_small_work_does_not_pass_a_large_one_that_lacks_blocks() -> None:
    bench = Bench(blocks=10)
    running = bench.submit(tokens=100, salt=1)
    large = bench.submit(tokens=120, salt=2)
    small = bench.submit(tokens=16, salt=3)
    assert [work.state for work in (running, large, small)] == [State.RUNNING, State.WAITING, State.WAITING]
    bench.run(1.0)
    assert times(large)[0] < times(small)[-1]
    assert bench.engine.pool.in_use == 0


def test_sequences_of_one_work_take_slots_each_and_share_the_prompt() -> None:
    bench = Bench(seqs=4)
    bench.submit(tokens=32, steps=16, sequences=3)
    assert bench.engine.pool.in_use == 2 + 3
    bench.submit(sequences=2)
    assert (bench.engine.running, bench.engine.waiting) == (1, 1)


def test_work_of_more_sequences_than_slots_runs_alone() -> None:
    bench = Bench(seqs=2)
    work = bench.submit(sequences=5)
    bench.run(1.0)
    assert work.state is State.COMPLETED


def test_aborted_work_gives_slots_and_blocks_to_the_next_at_once() -> None:
    bench = Bench(seqs=1)
    first, second = bench.submit(salt=1), bench.submit(salt=2)
    bench.run(0.11)
    bench.engine.abort(first, bench.clock())
    assert (first.state, second.state) == (State.ABORTED, State.RUNNING)
    bench.run(1.0)
    assert len(heard(first)) == 1
    assert len(heard(second)) == 3
    assert bench.engine.pool.in_use == 0


def test_aborted_waiter_leaves_the_queue() -> None:
    bench = Bench(seqs=1)
    bench.submit()
    waiter = bench.submit()
    bench.engine.abort(waiter, bench.clock())
    assert (bench.engine.waiting, bench.engine.counts.aborted) == (0, 1)


def test_abort_after_the_end_counts_nothing() -> None:
    bench = Bench()
    work = bench.submit()
    bench.run(1.0)
    bench.engine.abort(work, bench.clock())
    bench.engine.abort(work, bench.clock())
    assert (bench.engine.counts.aborted, bench.engine.counts.completed) == (0, 1)
    assert bench.engine.running == 0


def test_held_work_is_silent_and_keeps_its_blocks() -> None:
    bench = Bench()
    work = bench.submit()
    bench.run(0.11)
    bench.engine.hold(work)
    bench.run(5.0)
    assert len(heard(work)) == 1
    assert bench.engine.pool.in_use > 0
    bench.engine.abort(work, bench.clock())
    assert bench.engine.pool.in_use == 0


def test_frozen_engine_goes_on_where_it_stopped() -> None:
    bench = Bench()
    work = bench.submit()
    bench.run(0.11)
    bench.engine.freeze(bench.clock())
    late = bench.submit()
    assert (bench.engine.next_due(bench.clock()), late.state) == (None, State.WAITING)
    bench.run(10.0)
    assert bench.engine.step(bench.clock()) == ()
    bench.engine.thaw(bench.clock())
    bench.run(11.0)
    assert times(work) == pytest.approx([0.1, 10.01, 10.03], abs=0.001)
    assert times(late)[0] == pytest.approx(10.1, abs=0.001)


def test_wider_batch_starts_waiters() -> None:
    bench = Bench(seqs=1)
    bench.submit()
    waiter = bench.submit()
    bench.engine.resize(2, bench.clock())
    assert waiter.state is State.RUNNING


def test_answer_is_cached_for_the_next_turn() -> None:
    bench = Bench(Timing())
    prompt, answer = b"abcd" * 40, b"wxyz" * 24
    first = Work(make_prompt(prompt, 16), 24, _Sink(bench), answer=answer)
    bench.engine.submit(first, bench.clock())
    bench.run(1.0)
    second = Work(make_prompt(prompt + answer + b"more" * 20, 16), 1, _Sink(bench))
    bench.engine.submit(second, bench.clock())
    assert second.cached_tokens(16) == 64


def test_counts_tell_what_was_seen() -> None:
    bench = Bench(seqs=2)
    for _ in range(3):
        bench.submit(tokens=40, steps=5)
    bench.run(2.0)
    counts = bench.engine.counts
    assert (counts.completed, counts.generation_tokens, counts.prompt_tokens) == (3, 15, 120)
    assert (counts.max_running_seen, counts.max_waiting_seen) == (2, 1)
    assert counts.cached_tokens == 2 * 32
    assert counts.ttft_sum_s == pytest.approx(0.1 + 0.1 + 0.28, abs=0.01)
