"""The one error tree. Each message names the cause; `remedy` says what the user does about it.

Owns that, and `describe`: what of an error may leave its process for the ledger, where people read who may not see prompts and completions.
Every process catches `ScavengerError` at its outermost frame only, prints it and exits with `exit_code`; anything else is a bug and
keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

#: Remedies that several errors share.
SUSPECT_MEMORY = "where it happens on one node alone, suspect its memory"
ONE_RELEASE = f"run engines and trainer of one release; {SUSPECT_MEMORY}"


class ScavengerError(Exception):
    """Something a user or an admin can act on. `str()` is the cause followed by the remedy.

    Cause and remedy may go to the ledger: they name types, ids and settings. The text of foreign code's errors goes into `quoted`,
    because it may hold a prompt or a completion: `str()` has it, for the process's own log, and nothing that is sent does.
    """

    exit_code = 1

    def __init__(self, cause: str, remedy: str = "", *, quoted: str = "") -> None:
        whole = f"{cause}: {quoted}" if quoted else cause
        super().__init__(whole if not remedy else f"{whole}\n  remedy: {remedy}")
        self.cause = cause
        self.remedy = remedy
        self.quoted = quoted

    @property
    def log_text(self) -> str:
        """Cause and quotation, for a log."""
        return f"{self.cause}: {self.quoted}" if self.quoted else self.cause


@dataclass(frozen=True, slots=True)
class StartFinding:
    """What one check before a start found.

    `problem`: cause and remedy by line, "" where all is well. `note`: what was seen, or why nothing was.
    """

    what: str
    problem: str = ""
    note: str = ""
    skipped: bool = False


class ConfigError(ScavengerError):
    """A configuration file holds something that cannot be used."""

    exit_code = 2


class ClusterError(ScavengerError):
    """A cluster could not be observed or refused a command. Never means that the cluster is empty."""


class ClusterUnavailable(ClusterError):
    """The scheduler did not answer, or not completely; the same call may succeed later (back off and try again).

    `error_kind` names what kind of failure it was (`scavenger.cluster.error_kind.ErrorKind`); an answer that cannot be read is "partial".
    """

    def __init__(self, cause: str, remedy: str = "", *, error_kind: str = "partial") -> None:
        super().__init__(cause, remedy)
        self.error_kind = error_kind


class AccessDenied(ClusterError):
    """Slurm does not let this user see what a poll needs (PrivateData). Asking again changes nothing."""

    exit_code = ConfigError.exit_code


class SubmitUnknown(ClusterError):
    """A submission got no answer: the job may exist. Look it up by its intent before submitting again."""


class WireError(ScavengerError):
    """Bytes from a peer that are not a message of this protocol, or of a version we do not speak."""


class AuthError(ScavengerError):
    """A key is missing, has the wrong permissions, or is not allowed to do what was asked."""

    exit_code = ConfigError.exit_code  # only a person can mend it


class Refused(ScavengerError):
    """The daemon answered, and refused the request."""


class StaleAttempt(Refused):
    """A newer attempt of this run exists; this trainer must stop."""


class LedgerRestored(Refused):
    """The ledger was put back to an earlier state, which does not know this attempt; this trainer must end and be started again."""


class CheckpointAhead(Refused):
    """The checkpoint is of a later step than the ledger's last, `last_step`: an older one may be resumed from."""

    def __init__(self, cause: str, remedy: str, last_step: int) -> None:
        super().__init__(cause, remedy)
        self.last_step = last_step


class CheckpointFailed(ScavengerError):
    """A checkpoint could not be written; those before it are whole."""


class Diverged(ScavengerError):
    """A step's gradient is no number, or infinite, or its samples are too old. The step was not taken."""


class StaleSamples(Diverged):
    """A step's samples are too far from the weights that train them. The parameters are the step before's."""


class DaemonUnavailable(ScavengerError):
    """No daemon answered within the deadline."""


class LedgerError(ScavengerError):
    """The ledger cannot be opened or written."""


class LedgerRefused(LedgerError):
    """The ledger that is named can be none, or is not the one that belongs here. Nothing was written."""

    exit_code = ConfigError.exit_code


class NotInLedger(LedgerError):
    """What was asked for is not in the ledger: it never was, or it was purged."""


class LedgerUnavailable(LedgerError):
    """The ledger cannot be read at this moment; the same read may succeed later (back off and try again)."""


class Fenced(LedgerError):
    """A newer generation owns the ledger; this daemon must stop at once, and not be restarted into a ping-pong."""

    exit_code = 4


class LedgerHeld(LedgerError):
    """Another daemon is at work on this ledger or state directory; this one did not start, and wrote nothing."""

    exit_code = Fenced.exit_code  # not to be tried again and again either


class WeightsError(ScavengerError):
    """A weight version could not be completed or did not match its manifest. The old version stays in place."""


class EngineError(ScavengerError):
    """An inference engine cannot serve."""


class WeightsDiffer(EngineError):
    """What an engine merged is not what its trainer merged, or does not sit in it: bad memory, or code of another release."""


class SimulationError(ScavengerError):
    """A simulation cannot go on: a scenario that cannot be, or a bug of the simulator."""


class RewardError(ScavengerError):
    """A reward function raised or ran past its deadline: there is no reward. Only `RewardTimeout` counts as 0."""


class RewardTimeout(RewardError):
    """Every try ran past the deadline, in a verifier for which such a completion is wrong: the reward is 0."""


def describe(error: BaseException) -> str:
    """What the ledger may hold of an error: nothing that is foreseen quotes contents, and of the unforeseen only type and place."""
    if isinstance(error, ScavengerError):
        return error.cause if not error.remedy else f"{error.cause}\n  remedy: {error.remedy}"
    frame = error.__traceback__
    if frame is None:
        return type(error).__name__
    while frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{PurePath(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
    return f"{type(error).__name__} at {where} (its own words are in the log of the process)"
