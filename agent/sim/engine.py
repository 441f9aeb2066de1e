"""The simulated engine: continuous batching, a FIFO queue and the time tokens take. Pure.

Rules:
    - A work runs when its sequences fit `max_num_seqs` and all the blocks it will ever need are there; until
      then it waits, and nothing behind it passes it. (vLLM takes blocks as it goes and preempts; reserving
      them at the start gives the same queue without preemption.)
    - The first token comes `ttft_s` plus `prefill_s_per_token` for every uncached prompt token after the
      start, each further one `itl_s` after the one before. Sequences do not slow each other down: load shows
      as waiting.
    - A work that ends or is aborted gives slots and blocks back at once; the next may start in the same call.

The clock is the caller's: every method that needs the time takes `now`, monotonic seconds. Time is cut into
quanta of half a millisecond, so that the tokens of many streams come in batches; a token is never early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import Protocol

from agent.sim.blocks import Allocation, BlockPool
from agent.sim.prompt import Prompt, continue_hashes

_QUANTA_PER_S = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How fast the engine is; seconds.

    Attributes:
        ttft_s: time to the first token without the prompt's part.
        prefill_s_per_token: added for each prompt token that is not cached.
        itl_s: between tokens.
        slow_factor: multiplies all three.
    """

    ttft_s: float = 0.0
    prefill_s_per_token: float = 0.0
    itl_s: float = 0.0
    slow_factor: float = 1.0


class State(Enum):
    """Where a work is in its life."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"


class Sink(Protocol):
    """Who a work's tokens are for."""

    def on_step(self, work: Work) -> None:
        """Take the tokens up to `work.produced`."""


class Work:
    """One request inside the engine; its fields belong to `Engine`, except `sink`.

    Args:
        prompt: what is asked.
        steps: tokens to generate, per sequence; at least 1, also where the step gives no token (embeddings).
        sequences: answers generated side by side (`n`).
        generates: whether steps are tokens.
        is_stepwise: tell the sink of every token; else once, at the end.
        slow_factor: multiplies this work's times.
        answer: bytes of the answer, 4 per token, from which its blocks get their hashes; empty: not cached.
        sink: see `Sink`.
    """

    __slots__ = (
        "allocation", "answer", "due", "generates", "is_active", "is_stepwise", "itl", "produced", "prompt",
        "sequences", "sink", "slow_factor", "started_at", "state", "steps", "stride", "submitted_at",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Prompt,
        steps: int,
        sink: Sink,
        *,
        sequences: int = 1,
        generates: bool = True,
        is_stepwise: bool = True,
        slow_factor: float = 1.0,
        answer: bytes = b"",
    ) -> None:
        self.prompt = prompt
        self.steps = steps
        self.sink = sink
        self.sequences = sequences
        self.generates = generates
        self.is_stepwise = is_stepwise
        self.slow_factor = slow_factor
        self.answer = answer
        self.stride = 1 if is_stepwise else steps
        self.state = State.NEW
        self.is_active = False  # running, and not held
        self.allocation: Allocation | None = None
        self.produced = 0
        self.itl = 0.0
        self.due = 0.0
        self.submitted_at = 0.0
        self.started_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the last token was produced."""
        return self.produced >= self.steps

    def cached_tokens(self, block_size: int) -> int:
        """Prompt tokens that were in the prefix cache."""
        return self.allocation.shared * block_size if self.allocation is not None else 0


@dataclass(slots=True)
class Counts:
    """What an engine has done since its start or the last reset; tokens or requests."""

    completed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    max_running_seen: int = 0
    max_waiting_seen: int = 0
    first_tokens: int = 0
    ttft_sum_s: float = 0.0
    queue_sum_s: float = 0.0


class Engine:
    """A batch, a queue and a block pool.

    Args:
        timing: may be replaced at any time; works take it when they start.
        max_num_seqs: sequences that run at once.
        num_blocks: KV blocks.
        block_size: tokens per block.
    """

    def __init__(self, timing: Timing, *, max_num_seqs: int, num_blocks: int, block_size: int) -> None:
        self.timing = timing
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.counts = Counts()
        self.running = 0  # works
        self._sequences = 0
        self._waiting: deque[Work] = deque()
        # Quantum -> works due in it, and the quanta as a heap; works due already.
        self._buckets: dict[int, list[Work]] = {}
        self._quanta: list[int] = []
        self._soon: list[Work] = []
        # While frozen the engine's own time stands still; afterwards it lags by the sum of such times.
        self._frozen_at: float | None = None
        self._lag = 0.0

    @property
    def waiting(self) -> int:
        """Works in the queue."""
        return len(self._waiting)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing makes progress."""
        return self._frozen_at is not None

    def blocks_needed(self, work: Work) -> int:
        """Blocks that `work` takes from its start to its end."""
        tokens = work.prompt.tokens + (work.steps if work.generates else 0)
        first = -(-tokens // self.block_size)
        # The sequences of one work share its prompt.
        further = first - work.prompt.tokens // self.block_size
        return first + (work.sequences - 1) * further

    def can_ever_run(self, work: Work) -> bool:
        """Whether an empty engine has room for `work`."""
        return self.blocks_needed(work) <= self.pool.num_blocks

    def submit(self, work: Work, now: float) -> None:
        """Queue a work, and start it if nothing is before it and there is room."""
        work.state = State.WAITING
        work.submitted_at = now
        self._waiting.append(work)
        self._start_waiting(now)
        self.counts.max_waiting_seen = max(self.counts.max_waiting_seen, len(self._waiting))

    def abort(self, work: Work, now: float) -> None:
        """End a work wherever it is; nothing happens to one that has ended."""
        if work.state is State.WAITING:
            self._waiting.remove(work)
        elif work.state is State.RUNNING:
            self._give_back(work, ())
        else:
            return
        work.state = State.ABORTED
        work.is_active = False
        self.counts.aborted += 1
        self._start_waiting(now)

    def hold(self, work: Work) -> None:
        """Let a running work make no more progress; it keeps slots and blocks until it is aborted."""
        work.is_active = False

    def freeze(self, now: float) -> None:
        """Stop all progress: nothing starts, no token comes."""
        if self._frozen_at is None:
            self._frozen_at = now

    def thaw(self, now: float) -> None:
        """Go on where `freeze` stopped."""
        if self._frozen_at is not None:
            self._lag += now - self._frozen_at
            self._frozen_at = None
            self._start_waiting(now)

    def resize(self, max_num_seqs: int, now: float) -> None:
        """Change how many sequences run at once; those that run go on."""
        self.max_num_seqs = max_num_seqs
        self._start_waiting(now)

    def next_due(self, now: float) -> float | None:
        """Seconds until `step` has something to give; None for never, as things are."""
        if self._frozen_at is not None:
            return None
        if self._soon:
            return 0.0
        if self._quanta:
            return max(0.0, self._quanta[0] / _QUANTA_PER_S + self._lag - now)
        return None

    def step(self, now: float) -> Sequence[Work]:
        """Produce the tokens that are due, at most one per stepwise work, and return their works.

        Works whose last token this was have already given everything back.
        """
        if self._frozen_at is not None:
            return ()
        time = now - self._lag
        due = self._soon
        self._soon = soon = []
        last = int(time * _QUANTA_PER_S)
        quanta, buckets = self._quanta, self._buckets
        while quanta and quanta[0] <= last:
            due += buckets.pop(heappop(quanta))
        if not due:
            return ()
        stepped = []
        tokens = 0
        has_ended = False
        for work in due:
            if not work.is_active:
                continue
            stepped.append(work)
            if not work.produced:
                self.counts.first_tokens += 1
                self.counts.ttft_sum_s += now - work.submitted_at
            work.produced += work.stride
            if work.generates:
                tokens += work.stride * work.sequences
            if work.produced >= work.steps:
                self._complete(work)
                has_ended = True
                continue
            at = work.due = work.due + work.itl
            if at <= time:
                soon.append(work)
                continue
            quantum = int(at * _QUANTA_PER_S) + 1
            bucket = buckets.get(quantum)
            if bucket is None:
                buckets[quantum] = [work]
                heappush(quanta, quantum)
            else:
                bucket.append(work)
        self.counts.generation_tokens += tokens
        if has_ended:
            self._start_waiting(now)
        return stepped

    def reset(self) -> None:
        """Forget counts and cached prompts; works go on."""
        self.counts = Counts(max_running_seen=self.running, max_waiting_seen=len(self._waiting))
        self.pool.forget()

    def _start_waiting(self, now: float) -> None:
        while self._waiting and self._frozen_at is None:
            work = self._waiting[0]
            # A work of more sequences than the engine runs gets the engine for itself.
            if self._sequences and self._sequences + work.sequences > self.max_num_seqs:
                return
            prompt = work.prompt
            most_shared = (prompt.tokens - 1) // self.block_size
            allocation = self.pool.try_allocate(prompt.hashes, self.blocks_needed(work), most_shared)
            if allocation is None:
                return
            self._waiting.popleft()
            self._start(work, allocation, now)

    def _start(self, work: Work, allocation: Allocation, now: float) -> None:
        timing = self.timing
        factor = timing.slow_factor * work.slow_factor
        cached = allocation.shared * self.block_size
        work.allocation = allocation
        work.state = State.RUNNING
        work.is_active = True
        work.started_at = now
        work.itl = timing.itl_s * factor
        delay = (timing.ttft_s + timing.prefill_s_per_token * (work.prompt.tokens - cached)) * factor
        if not work.is_stepwise:
            delay += work.itl * (work.steps - 1)
        self.running += 1
        self._sequences += work.sequences
        counts = self.counts
        counts.prompt_tokens += work.prompt.tokens
        counts.cached_tokens += cached
        counts.queue_sum_s += now - work.submitted_at
        counts.max_running_seen = max(counts.max_running_seen, self.running)
        work.due = now - self._lag + delay
        if delay <= 0:
            self._soon.append(work)
            return
        quantum = int(work.due * _QUANTA_PER_S) + 1
        bucket = self._buckets.get(quantum)
        if bucket is None:
            self._buckets[quantum] = [work]
            heappush(self._quanta, quantum)
        else:
            bucket.append(work)

    def _complete(self, work: Work) -> None:
        generated: Sequence[int] = ()
        if work.answer:
            generated = continue_hashes(work.prompt, work.answer, self.block_size)
        self._give_back(work, generated)
        work.state = State.COMPLETED
        work.is_active = False
        self.counts.completed += 1

    def _give_back(self, work: Work, generated: Sequence[int]) -> None:
        assert work.allocation is not None
        self.pool.release(work.allocation, generated)
        self.running -= 1
        self._sequences -= work.sequences
