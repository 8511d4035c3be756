"""Any process may be killed at any instant: a run that is hurt all the while ends as if nothing had happened (`scripts/chaos`)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from scavenger.demo.site import DemoSite, SiteOptions
from tests.chaos.audit import audit, table
from tests.chaos.run import Chaos, Options
from tests.system import agents, play

pytestmark = pytest.mark.mpi


def _play(options: Options, model: Path, undisturbed: play.Result) -> Chaos:
    said: list[str] = []
    chaos = Chaos(options, model, said.append)
    outcome = chaos.play(undisturbed.until(options.steps))
    faults = {**dict(sorted(outcome.done.items())), "planned and not done": outcome.left}
    assert outcome.sound, "\n".join(
        [*said, *outcome.own_ends, table(f"seed {options.seed}", outcome.audit, faults)]
    )
    assert outcome.audit.facts["tokens witnessed"] > 0
    assert sum(count for name, count in outcome.done.items() if name.startswith("kill")) == options.kills
    return chaos


def test_kills_of_daemon_engine_and_trainer_and_a_zombie_change_nothing(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    parts = ("daemon", "engine", "rank")
    options = Options(
        tmp_path, seed=163, kills=8, steps=3, kinds=("kill", "stop"), local_parts=parts, pace=15.0
    )
    chaos = _play(options, small_model, undisturbed)
    for wrong, counted in PLANTED.items():
        _plant_and_find(wrong, counted, chaos, undisturbed.until(options.steps))


_LAST = (
    "(SELECT max(c.id) FROM chunks c JOIN samples s ON s.sample_id = c.sample_id WHERE s.state = 'consumed')"
)
#: What could be wrong with a ledger, and the count that must tell.
PLANTED = {
    f"UPDATE chunks SET tokens = x'7FFFFFFF' || substr(tokens, 5) WHERE id = {_LAST}": "committed tokens lost",
    f"DELETE FROM chunks WHERE id = {_LAST}": "committed tokens lost",
    "INSERT INTO sample_ends (sample_id, state, reason, step, attempt, reward_version, at) "
    "SELECT sample_id, state, reason, step, attempt, reward_version, at "
    "FROM sample_ends WHERE state = 'consumed' ORDER BY id DESC LIMIT 1": "samples consumed twice",
    (
        "UPDATE samples SET state = 'masked' WHERE sample_id = (SELECT "
        "max(sample_id) FROM samples WHERE state = 'consumed')"
    ): "prompts skipped",
    f"UPDATE chunks SET epoch = epoch - 1 WHERE id = {_LAST}": "stale chunks accepted",
    "UPDATE steps SET metrics = json_set(metrics, '$.reward', 2) "
    "WHERE id = (SELECT max(id) FROM steps WHERE purpose = 'train')": "steps with another reward or loss than undisturbed",
}


def _plant_and_find(wrong: str, counted: str, chaos: Chaos, undisturbed: play.Result) -> None:
    """Do that to the ledger of the ended run, audit it, and undo it."""
    site = DemoSite(SiteOptions("local", chaos.options.dir))
    path = site.state_dir / "ledger.sqlite3"
    sound = path.read_bytes()
    try:
        with sqlite3.connect(path) as connection:
            assert connection.execute(wrong).rowcount > 0
        connection.close()
        assert audit(site, chaos.watcher, undisturbed).counts[counted] > 0, wrong
    finally:
        for left in path.parent.glob("ledger.sqlite3-*"):
            left.unlink()
        path.write_bytes(sound)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_fifty_kills_zombies_and_black_holes_change_nothing_on_sqlite(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    _play(
        Options(tmp_path, seed=50, kills=50, steps=12, kinds=("kill", "stop", "hole")),
        small_model,
        undisturbed,
    )


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.timeout(1500)
def test_fifty_kills_zombies_and_black_holes_change_nothing_on_postgresql(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    options = Options(
        tmp_path, seed=51, kills=50, steps=12, kinds=("kill", "stop", "hole"), database="postgres"
    )
    _play(options, small_model, undisturbed)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_kills_lose_nothing_of_what_is_generated_in_advance(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    """With k = 4 tokens depend on when weights came. None is lost, trained twice or beyond k, whoever dies."""
    chaos = _play(
        Options(tmp_path, seed=54, kills=20, steps=8, kinds=("kill", "stop", "hole"), off_policy=4),
        small_model,
        undisturbed,
    )
    site = DemoSite(SiteOptions("local", chaos.options.dir))
    found = audit(site, chaos.watcher, undisturbed.until(8), off_policy=4)
    assert found.facts["steps with tokens of older weights"] > 2, "hardly anything was generated in advance"
    strict = audit(site, chaos.watcher, undisturbed.until(8), off_policy=1)
    assert strict.counts["steps with tokens older than allowed"] > 0, "what would be found"


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_kills_that_hurt_no_engine_generate_nothing_and_ask_nothing_again(
    tmp_path: Path, small_model: Path
) -> None:
    """Tools with effects outside: nobody hurts an engine, and so no token at all may be generated again."""
    parts = ("daemon", "gateway", "environment")
    options = Options(
        tmp_path / "run", seed=190, kills=12, steps=5, local_parts=parts, episodes="external", pace=6.0
    )
    said: list[str] = []
    with agents.ToolServer().serving() as tool:
        whole = agents.undisturbed(agents.plain(small_model, tool, tmp_path), tmp_path / "ref", 5)
    chaos = Chaos(options, small_model, said.append)
    outcome = chaos.play(whole)
    assert outcome.sound, "\n".join([*said, table("episodes", outcome.audit, dict(outcome.done))])
    assert {f"kill {part}" for part in parts} <= outcome.done.keys()
    # What would be found:
    site, episodes = DemoSite(SiteOptions("local", chaos.options.dir)), chaos.agents()
    assert episodes is not None
    episodes.tool.asked.append(episodes.tool.asked[0])
    with sqlite3.connect(site.state_dir / "ledger.sqlite3") as connection:
        connection.execute("UPDATE samples SET regenerated = 3 WHERE sample_id = 1")
    connection.close()
    found = audit(site, chaos.watcher, whole, episodes=episodes)
    assert found.counts["calls of a tool that was asked twice"] == 1
    assert found.counts["tokens generated again"] == 3


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_kills_of_all_but_the_trainer_change_no_episode(tmp_path: Path, small_model: Path) -> None:
    with agents.ToolServer().serving() as tool:
        whole = agents.undisturbed(agents.plain(small_model, tool, tmp_path), tmp_path / "ref", 8)
    options = Options(
        tmp_path / "run", seed=191, kills=24, steps=8, kinds=("kill", "stop", "hole"), episodes="none"
    )
    _play(options, small_model, whole)


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.timeout(1500)
def test_kills_of_slurmctld_too_change_nothing_on_slurm(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    _play(
        Options(tmp_path, seed=52, kills=12, steps=6, kinds=("kill", "stop"), backend="slurm"),
        small_model,
        undisturbed,
    )
