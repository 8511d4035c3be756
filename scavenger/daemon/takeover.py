"""Whether a daemon that starts may take the ledger: at once, not while another is at work, or after that one's silence. Pure.

Generations fence an older daemon whatever is decided here (`ledger.write.transaction`). This only keeps a second `scavenger daemon`,
started by mistake, from ending the first.

The clocks of two hosts may differ. So a holder on another host is watched for at least `WATCH_S` before it counts as silent, and a
heartbeat that moves proves it alive whatever its clock says. Time is an input. Knows no file and no database.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

#: How often a daemon commits although nothing happens, and the silence after which it is taken to hang, to be cut off or to be dead.
BEAT_S = 5.0
SILENT_S = 60.0
#: Two heartbeats and a slow commit.
WATCH_S = 2.5 * BEAT_S


class Manner(StrEnum):
    """How a daemon comes to a ledger that another one holds."""

    ASK = "ask"  # refuse while it is at work
    STAND_BY = "stand by"  # wait until it is silent, gone or has ended
    TAKE_OVER = "take over"  # fence it


class HolderVerdict(StrEnum):
    """In the order in which one of several holders decides for all."""

    REFUSE = "refuse"
    WAIT = "wait"
    TAKE = "take"


@dataclass(frozen=True, slots=True)
class Sign:
    """One observation of a daemon that holds the ledger. `who` names it; `beat` is its last heartbeat (Unix seconds, by its own clock).

    `gone`: its process ended, which only its own host can see. `here`: it runs on this host.
    """

    who: str
    beat: float
    gone: bool
    here: bool


@dataclass(slots=True)
class _Quiet:
    """A holder's newest heartbeat, since when (monotonic seconds) no newer one came, and whether it came while this daemon watched."""

    beat: float
    since: float
    came: bool


class TakeoverWatch:
    """Decides for one starting daemon, poll by poll, about the daemons that hold its ledger or its state directory."""

    def __init__(self, manner: Manner = Manner.ASK) -> None:
        self.manner = manner
        self._quiet: dict[str, _Quiet] | None = None

    def poll(
        self, signs: Iterable[Sign], now: float, monotonic: float
    ) -> tuple[HolderVerdict, str, Sign | None]:
        """The verdict, its reason and the holder that caused it; (TAKE, reason, None) where there is no holder.

        `now` (Unix seconds) and `monotonic` are this host's clocks.
        """
        first, known = self._quiet is None, self._quiet or {}
        self._quiet = {}
        found: list[tuple[HolderVerdict, str, Sign | None]] = []
        for sign in signs:
            before = known.get(sign.who)
            quiet = (
                before
                if before is not None and before.beat == sign.beat
                else _Quiet(sign.beat, monotonic, not first)
            )
            self._quiet[sign.who] = quiet
            found.append((*self._judge(sign, quiet, now, monotonic), sign))
        order = list(HolderVerdict)
        return min(
            found,
            key=lambda each: order.index(each[0]),
            default=(HolderVerdict.TAKE, "no daemon holds it", None),
        )

    def _judge(self, sign: Sign, quiet: _Quiet, now: float, monotonic: float) -> tuple[HolderVerdict, str]:
        if self.manner is Manner.TAKE_OVER:
            return HolderVerdict.TAKE, "--take-over"
        if sign.gone:
            return HolderVerdict.TAKE, "its process is gone"
        quiet_s, age_s = monotonic - quiet.since, now - sign.beat
        if quiet_s >= SILENT_S or (age_s >= SILENT_S and (sign.here or quiet_s >= WATCH_S)):
            return HolderVerdict.TAKE, f"no heartbeat for {max(quiet_s, age_s):.0f} s"
        if self.manner is Manner.STAND_BY:
            return HolderVerdict.WAIT, "standing by until it ends or is silent"
        if sign.here or quiet.came:
            return HolderVerdict.REFUSE, f"its heartbeat is {max(0.0, age_s):.0f} s old"
        return (
            HolderVerdict.WAIT,
            f"watched for a heartbeat, which comes every {BEAT_S:g} s; taken over after {SILENT_S:g} s without one",
        )
