"""Scores of endpoints whose engine metrics cannot be used."""

from __future__ import annotations

from gateway.core.schedule.pipeline import STALE

NEUTRAL_SCORE = 0.5
"""Of what is not known and need not be bad: a new endpoint, a figure that the engine does not publish."""


def score_unscraped(state: float) -> float:
    """Return the score of an endpoint without a fresh scrape.

    One whose scrapes fail scores 0: less is known of it than of any other. One that was never scraped is new.
    """
    return 0.0 if state == STALE else NEUTRAL_SCORE
