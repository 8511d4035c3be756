"""How long silence may last: doubled by each connection that is given up, and taken back only by what proves that the link is quick."""

from __future__ import annotations

from scavenger.client import MAX_TIMEOUT_S, MIN_TIMEOUT_S, ClientTimeout


def reconnected(patience: ClientTimeout, now: float) -> float:
    """A connection is given up, the next one made, and Attach answered at once."""
    patience.gave_up()
    patience.connected(now)
    patience.asked(now)
    patience.heard(now + 0.01, group=False)
    return now + 0.01


def test_a_message_of_any_length_within_the_bound_comes_in_the_end() -> None:
    for length in (5.0, 30.0, 63.0):
        patience, now, tries = ClientTimeout(0.0), 0.0, 1
        while (
            patience.limit < length
        ):  # each connection is given up before the group is whole, and the next sends it again
            now = reconnected(patience, now + patience.limit)
            tries += 1
        assert tries <= 5
        patience.heard(now + length, group=True)
        assert patience.limit >= length, "the next group is as long"
    assert patience.limit == MAX_TIMEOUT_S


def test_patience_ends_with_the_slow_link() -> None:
    patience = ClientTimeout(0.0)
    for at in range(5):
        reconnected(patience, 100.0 * at)
    assert patience.limit == MAX_TIMEOUT_S
    now = 500.0
    for _ in range(5):
        patience.asked(now)
        patience.heard(now + 0.01, group=False)
        now += 1.0
    assert patience.limit == MIN_TIMEOUT_S


def test_silence_counts_from_the_question() -> None:
    """A trainer that computed for a minute asked nothing meanwhile: nobody was silent."""
    patience = ClientTimeout(0.0)
    patience.asked(60.0)
    assert patience.silence(61.0) == 1.0
    patience.heard(61.0, group=True)
    assert patience.limit == MIN_TIMEOUT_S


def test_a_reply_is_lost_when_other_messages_come_for_long_and_longer_on_a_slow_link() -> None:
    patience = ClientTimeout(0.0)
    assert patience.is_lost(21.0, sent_at=0.0)
    assert not patience.is_lost(19.0, sent_at=0.0)
    for _ in range(3):
        patience.gave_up()
    assert not patience.is_lost(63.0, sent_at=0.0)
