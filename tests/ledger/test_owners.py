"""A daemon notes under which name it knows an owner's key, so that reports can name users."""

from __future__ import annotations

import asyncio
from pathlib import Path

from scavenger import keys
from scavenger.config import DaemonConfig
from scavenger.daemon import Daemon
from scavenger.succession import Manner
from tests.ledger.examples import WAIT_S, written
from tests.ledger.histories import fetch
from tests.ledger.test_keeper import restorable

NOTED = "SELECT reason FROM events WHERE kind = 'owner_enrolled' ORDER BY id"


def test_each_owner_is_noted_once_with_its_name(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "ada")
    ada = keys.read_keypair(keys.owner_key_path(state_dir)).public
    config = DaemonConfig.model_validate({"daemon": {"state_dir": state_dir}, "harvest": {"enabled": False}})
    written(config.ledger_url, restorable())

    async def live() -> None:
        daemon = Daemon(config, None, Manner.TAKE_OVER)
        serving = asyncio.create_task(daemon.run())
        async with asyncio.timeout(WAIT_S):
            while not await asyncio.to_thread(fetch, config.ledger_url, NOTED):
                assert not serving.done(), await serving
                await asyncio.sleep(0.02)
            keys.enroll(state_dir, "bob", "b" * 40)
            while len(await asyncio.to_thread(fetch, config.ledger_url, NOTED)) < 2:
                assert not serving.done(), await serving
                await asyncio.sleep(0.02)
        daemon.stop.set()
        await serving

    asyncio.run(live())
    assert fetch(config.ledger_url, NOTED) == [("ada",), ("bob",)], "each once, not at every look"
    names = fetch(config.ledger_url, "SELECT subject, reason FROM events WHERE kind = 'owner_enrolled' ORDER BY id")
    assert names == [(ada, "ada"), ("b" * 40, "bob")]
