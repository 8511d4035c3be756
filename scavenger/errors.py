"""The one error tree. Each message names the cause; `remedy` says what the user does about it.

Owns nothing else. Every process catches `ScavengerError` at its outermost frame only, prints it and exits with
`exit_code`; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class ScavengerError(Exception):
    """Something a user or an admin can act on. `str()` is the cause followed by the remedy."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause if not remedy else f"{cause}\n  remedy: {remedy}")
        self.cause = cause
        self.remedy = remedy


class ConfigError(ScavengerError):
    """A configuration file holds something that cannot be used."""

    exit_code = 2


class ClusterError(ScavengerError):
    """A cluster could not be observed or refused a command. Never means that the cluster is empty."""


class ClusterUnavailable(ClusterError):
    """The scheduler did not answer; the same call may succeed later (back off and try again)."""


class SubmitUnknown(ClusterError):
    """A submission got no answer: the job may exist. Look it up by its intent before submitting again."""


class WireError(ScavengerError):
    """Bytes from a peer that are not a message of this protocol, or of a version we do not speak."""


class AuthError(ScavengerError):
    """A key is missing, has the wrong permissions, or is not allowed to do what was asked."""


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


class DaemonUnavailable(ScavengerError):
    """No daemon answered within the deadline."""


class LedgerError(ScavengerError):
    """The ledger cannot be opened or written."""


class LedgerUnavailable(LedgerError):
    """The ledger cannot be read at this moment; the same read may succeed later (back off and try again)."""


class Fenced(LedgerError):
    """A newer generation owns the ledger; this daemon must stop at once, and not be restarted into a ping-pong."""

    exit_code = 4


class WeightsError(ScavengerError):
    """A weight version could not be completed or did not match its manifest. The old version stays in place."""


class EngineError(ScavengerError):
    """An inference engine cannot serve."""


class SimulationError(ScavengerError):
    """A simulation cannot go on: a scenario that cannot be, or a bug of the simulator."""


class RewardError(ScavengerError):
    """A reward function raised or ran past its deadline. Not a reward of 0."""
