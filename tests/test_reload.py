"""What SIGHUP changes in a daemon that runs, and what it only names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scavenger.config import DaemonConfig
from scavenger.config.site import LIVE
from scavenger.daemon import reload


def config(**sections: dict[str, Any]) -> DaemonConfig:
    return DaemonConfig.model_validate(
        {"daemon": {"state_dir": Path("/s"), **sections.pop("daemon", {})}, **sections}
    )


def test_every_live_key_is_a_key() -> None:
    known = {
        f"{section}.{key}"
        for section, field in DaemonConfig.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    }  # type: ignore[union-attr]
    assert known >= LIVE


def test_live_keys_change_and_the_others_are_named_and_stay() -> None:
    now = config(harvest={"max_engines": 4})
    wanted = config(
        harvest={"max_engines": 0, "partition": "other", "headroom_gpus": 2}, daemon={"port": 7000}
    )
    plan = reload.plan(now, wanted)
    assert [change.key for change in plan.live] == ["harvest.headroom_gpus", "harvest.max_engines"]
    assert [str(change) for change in plan.restart] == [
        "daemon.port: 0 -> 7000",
        "harvest.partition: 'scavenge' -> 'other'",
    ]
    assert (plan.config.harvest.max_engines, plan.config.harvest.headroom_gpus) == (0, 2)
    assert (plan.config.harvest.partition, plan.config.daemon.port) == ("scavenge", 0)
    assert now.harvest.max_engines == 4, "what was in force is not touched"


def test_a_file_that_says_the_same_changes_nothing() -> None:
    plan = reload.plan(config(), config())
    assert (plan.live, plan.restart, plan.config) == ((), (), config())


def test_a_ledger_s_url_is_not_printed() -> None:
    plan = reload.plan(config(), config(daemon={"ledger": "postgresql://u:secret@db/x"}))
    assert [str(change) for change in plan.restart] == ["daemon.ledger"]


def test_a_section_that_came_later_needs_a_restart_unless_it_is_named_live() -> None:
    plan = reload.plan(config(), config(prometheus={"listen": "127.0.0.1:0"}))
    assert [change.key for change in plan.restart] == ["prometheus.listen"]
