"""How long a client listens to a silent daemon before it connects anew. Pure: the time is given.

Only whole messages are heard, and over a slow link one group may take long: whoever gives up after the same silence each time has the
group sent again each time, and never gets it. Owns these seconds; knows nothing of sockets, and of messages only which are groups.
"""

from __future__ import annotations

#: The patience to begin with, which is the least: the daemon answers a ping at once.
SILENT_S = 4.0
#: It doubles with each connection that is given up for silence, up to this.
MOST_SILENT_S = 64.0
#: A call that is not answered while other messages come: its reply was lost.
LOST_REPLY_S = 20.0


class Patience:
    """Of one client, over all its connections."""

    def __init__(self, now: float) -> None:
        self.limit = SILENT_S
        self.heard_at = self._asked_at = self._connected_at = now

    def connected(self, now: float) -> None:
        self.heard_at = self._connected_at = now

    def asked(self, now: float) -> None:
        """Something was said that is to be answered: silence before it means nothing."""
        self._asked_at = now

    def heard(self, now: float, *, group: bool) -> None:
        """Back by halves while messages come, and never below twice what one was waited for.

        What comes right after connecting proves nothing: the answer to an Attach is short, and the group behind it may be long.
        """
        if group or now - self._connected_at > self.limit:
            self.limit = min(max(SILENT_S, 2 * self.silence(now), self.limit / 2), MOST_SILENT_S)
        self.heard_at = now

    def silence(self, now: float) -> float:
        return now - max(self.heard_at, self._asked_at)

    def is_lost(self, now: float, sent_at: float) -> bool:
        """Whether the reply to what was sent then is taken for lost, though other messages come."""
        return now - sent_at > max(LOST_REPLY_S, 2 * self.limit)

    def gave_up(self) -> None:
        """A connection was given up for silence."""
        self.limit = min(2 * self.limit, MOST_SILENT_S)
