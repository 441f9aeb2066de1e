"""Greenlets with a name, an owner that joins them, and a hook for the day they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gevent import Greenlet, killall

LOG = logging.getLogger(__name__)


class Greenlets:
    """The greenlets of one owner.

    Args:
        on_failure: called in the greenlet that failed, with its name, after its exception was logged.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._running: dict[str, Greenlet] = {}

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, name: str, run: Callable[[], None]) -> None:
        """Start `run` under a name that no living greenlet of this owner has."""
        if name in self._running:
            raise ValueError(f"there is a greenlet {name!r} already")
        greenlet = Greenlet(self._run, name, run)
        greenlet.name = name
        greenlet.link(self._forget)
        self._running[name] = greenlet
        greenlet.start()

    def stop(self, names: Iterable[str] | None = None, *, timeout_s: float = 5.0) -> None:
        """End greenlets, by GreenletExit at their next switch, and wait for their end.

        Args:
            names: whom; None for all. Who has ended already is passed over.
            timeout_s: longest wait, in seconds.
        """
        wanted = [
            self._running[name]
            for name in (tuple(self._running) if names is None else names)
            if name in self._running
        ]
        killall(wanted, timeout=timeout_s)
        for greenlet in wanted:  # one killed before its first switch tells its links later
            self._forget(greenlet)

    def _run(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            LOG.exception("greenlet_failed", extra={"greenlet": name})
            self._on_failure(name)

    def _forget(self, greenlet: Greenlet) -> None:
        name: str = greenlet.name
        if self._running.get(name) is greenlet:
            del self._running[name]
