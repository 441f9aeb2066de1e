"""When a child process that ended is started again.

Rules:
    - The first restart is immediate. A child that keeps dying young is started again after 0.5 s, 1 s, 2 s,
      ... 10 s.
    - A child that lived `YOUNG_S` is sound: its death starts the count afresh.
    - A child that says it cannot boot (`EXIT_CANNOT_BOOT`) before any of its lives was sound ends the
      launcher: it will not boot by being asked again. Later on the same code is a death like others: what ran
      once is worth retrying, and a running gateway is not stopped for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.child import EXIT_CANNOT_BOOT

YOUNG_S = 10.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class Respawn:
    """Start the child again.

    Attributes:
        delay_s: seconds to wait first.
    """

    delay_s: float


@dataclass(frozen=True, slots=True)
class Halt:
    """Do not start it again; stop everything."""


class RespawnPolicy:
    """Deaths of one child, and what follows from them."""

    __slots__ = ("_was_sound", "_young_deaths")

    def __init__(self) -> None:
        self._young_deaths = 0
        self._was_sound = False

    def __repr__(self) -> str:
        return f"RespawnPolicy(young_deaths={self._young_deaths}, was_sound={self._was_sound})"

    def died(self, exit_code: int, lived_s: float) -> Respawn | Halt:
        """Decide what follows an end that nobody asked for.

        Args:
            exit_code: as `subprocess` has it, negative for a signal.
            lived_s: seconds from its start to its end.
        """
        if lived_s >= YOUNG_S:
            self._was_sound = True
            self._young_deaths = 0
            return Respawn(0.0)
        if exit_code == EXIT_CANNOT_BOOT and not self._was_sound:
            return Halt()
        self._young_deaths += 1
        if self._young_deaths == 1:
            return Respawn(0.0)
        # Bounded exponent: a crash loop of days must not build huge integers.
        return Respawn(min(FIRST_DELAY_S * 2.0 ** min(self._young_deaths - 2, 10), LONGEST_DELAY_S))
