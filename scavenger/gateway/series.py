"""A client's calls as episodes: of a caller that has one key for everything, and begins and ends nothing. Pure.

    join(request) -> the newest episode, or the one that has this request already
    leave(episode) -> the episodes that are over now

An episode's turns lie in the daemon's memory until it ends, and it may have `MAX_EPISODE_TURNS` of them. So calls are put into one episode
after another, which share what they share of their prompts, and the older ones end. A call that is repeated finds its turn for as long as
its episode is kept: at least `CALLS` further calls.

Boundary: which episode a call belongs to, apart from HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Calls of an episode after which the next one begins, and how many episodes are kept for calls that are repeated.
CALLS, EPISODES_KEPT = 2048, 2


@dataclass(slots=True)
class _Open:
    requests: set[str] = field(default_factory=set)
    running: int = 0


class Series:
    """The episodes of one client. `start`: a text that no other series of this client has, since names of ended episodes are refused."""

    def __init__(self, client: str, start: str) -> None:
        self._stem = f"{client}.{start}"
        self._number = 0
        self._open: dict[str, _Open] = {}  # oldest first

    def join(self, request: str) -> str:
        """The episode of a call that begins now. `request`: what the caller names it by, or its content."""
        for name, held in self._open.items():
            if request in held.requests:
                held.running += 1
                return name
        newest = next(reversed(self._open), "")
        if not newest or len(self._open[newest].requests) >= CALLS:
            self._number += 1
            newest = f"{self._stem}.{self._number}"
            self._open[newest] = _Open()
        self._open[newest].requests.add(request)
        self._open[newest].running += 1
        return newest

    def leave(self, episode: str) -> list[str]:
        """A call of the episode is over. Returns the episodes that no call is in and that are not kept: they are forgotten here."""
        self._open[episode].running -= 1
        over = [name for name in list(self._open)[:-EPISODES_KEPT] if not self._open[name].running]
        for name in over:
            del self._open[name]
        return over
