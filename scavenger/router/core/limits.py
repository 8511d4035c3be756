"""What the daemon's configuration means to the router's core. Pure."""

from __future__ import annotations

from scavenger.config import DaemonConfig
from scavenger.router.core.state import Limits


def limits_of(config: DaemonConfig) -> Limits:
    d = config.daemon
    return Limits(
        d.heartbeat_s,
        d.suspect_s,
        d.dead_s,
        d.reconnect_s,
        d.flush_ms,
        d.flush_tokens,
        trainer_silent_s=d.trainer_silent_s,
        trainer_gone_s=d.trainer_gone_s,
        stalled_s=d.engine_stalled_s,
    )
