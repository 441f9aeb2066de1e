"""What instances tell each other, and who is taken for dead."""

from __future__ import annotations

from coordinator.core.peer_rows import EMPTY, SILENT_S, LaneRow, Peer, Row, Watch, decode, encode, replaced


def test_a_row_survives_the_wire() -> None:
    row = Row("h:1", {"e": 3}, {"p": 2}, (LaneRow("p", "m", (0, 4), (0, 2), 9, is_full=True),))
    assert decode(encode(row)) == row


def test_a_row_that_cannot_be_read_says_nothing() -> None:
    assert decode(b"\xc1 another version") == EMPTY
    assert decode(b"") == EMPTY


def test_who_says_nothing_new_for_long_is_silent() -> None:
    watch = Watch()
    assert watch.look({"a": 1, "b": 1}, 10.0) == frozenset()
    assert watch.look({"a": 1, "b": 2}, 11.0) == frozenset()
    assert watch.look({"a": 1, "b": 2}, 10.0 + SILENT_S) == {"a"}
    assert watch.look({"a": 2, "b": 2}, 10.1 + SILENT_S) == frozenset()


def test_time_in_which_nothing_was_seen_does_not_count() -> None:
    watch = Watch()
    watch.look({"a": 1}, 10.0)
    watch.reset()
    assert watch.look({"a": 1}, 100.0) == frozenset()


def test_a_silent_instance_whose_address_another_one_has_is_gone() -> None:
    peers = {
        name: Peer(1, Row(address), {}) for name, address in [("old", "h:1"), ("new", "h:1"), ("x", "h:2")]
    }
    assert replaced({"old", "x"}, peers, "h:9") == {"old"}
    assert replaced({"x"}, peers, "h:2") == {"x"}
    assert replaced({"old"}, {"old": Peer(1, EMPTY, {})}, "") == frozenset()
