"""A harvester goes on with the limits of a changed configuration, and refuses one that it could not submit with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scavenger.cluster.model import JobState
from scavenger.errors import ConfigError
from tests.harvest.world import World, running, until


def test_a_lower_limit_takes_effect_without_a_restart(world: World) -> None:
    async def play() -> None:
        world.want(2)
        harvester = world.harvester(drain_notice_s=0.5)
        async with running(harvester, cancel=True):
            await until("two engines run", lambda: len(world.jobs(JobState.RUNNING)) == 2)
            lower = harvester.config.harvest.model_copy(update={"max_engines": 0})
            harvester.reconfigure(harvester.config.model_copy(update={"harvest": lower}))
            await until("they are gone", lambda: not world.jobs())

    asyncio.run(play())


def test_a_template_that_cannot_be_rendered_changes_nothing(world: World, tmp_path: Path) -> None:
    harvester = world.harvester()
    bad = tmp_path / "bad.j2"
    bad.write_text("#!/bin/bash\n{{ no_such_thing }}\n")
    before = harvester.config
    wanted = before.harvest.model_copy(update={"job_template": bad, "max_engines": 1})
    with pytest.raises(ConfigError, match="cannot be rendered"):
        harvester.reconfigure(before.model_copy(update={"harvest": wanted}))
    assert harvester.config is before
