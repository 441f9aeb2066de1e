"""Restart policy of the launcher's children: gateway.core.respawn."""

from __future__ import annotations

from conf.child import EXIT_CANNOT_BOOT
from gateway.core.respawn import LONGEST_DELAY_S, YOUNG_S, Halt, Respawn, RespawnPolicy


def test_first_death_is_followed_by_an_immediate_restart():
    assert RespawnPolicy().died(1, lived_s=0.2) == Respawn(0.0)


def test_a_child_that_keeps_dying_young_waits_twice_as_long_each_time_up_to_the_longest_delay():
    policy = RespawnPolicy()
    delays = [verdict.delay_s for _ in range(9) if isinstance(verdict := policy.died(-9, 0.1), Respawn)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]


def test_a_crash_loop_of_days_still_gets_the_longest_delay():
    policy = RespawnPolicy()
    for _ in range(20_000):
        verdict = policy.died(1, 0.1)
    assert verdict == Respawn(LONGEST_DELAY_S)


def test_a_sound_life_starts_the_count_afresh():
    policy = RespawnPolicy()
    for _ in range(5):
        policy.died(1, 0.1)
    assert policy.died(1, YOUNG_S) == Respawn(0.0)
    assert policy.died(1, 0.1) == Respawn(0.0)


def test_a_child_that_cannot_boot_halts_the_launcher():
    assert RespawnPolicy().died(EXIT_CANNOT_BOOT, 0.5) == Halt()


def test_a_child_that_cannot_boot_after_a_crash_halts_the_launcher():
    policy = RespawnPolicy()
    policy.died(-11, 0.5)
    assert policy.died(EXIT_CANNOT_BOOT, 0.5) == Halt()


def test_the_cannot_boot_code_after_a_sound_life_is_a_death_like_others():
    policy = RespawnPolicy()
    policy.died(-9, YOUNG_S * 100)
    assert policy.died(EXIT_CANNOT_BOOT, 0.5) == Respawn(0.0)
    assert policy.died(EXIT_CANNOT_BOOT, 0.5) == Respawn(0.5)


def test_the_cannot_boot_code_of_a_child_that_lived_long_is_a_death_like_others():
    assert RespawnPolicy().died(EXIT_CANNOT_BOOT, YOUNG_S) == Respawn(0.0)
