"""Environment workers' processes: scripted ones, which die, fail to start, and play."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.errors import ConfigError, RewardError
from trainer.episodes import wire
from trainer.episodes.pool import MOST_VAIN, EnvironmentPool

SETUP = wire.Setup("env", "{}", "{}", "/model", "r", 64, "http://127.0.0.1:1", "branch", 0, 0, 60.0)
PROGRAM = """
import os, sys, time, msgspec
from trainer.algorithms.rewards import framed, read_frame
from trainer.episodes import wire

def tell(message):
    sys.stdout.buffer.write(framed(msgspec.msgpack.encode(message)))
    sys.stdout.buffer.flush()

setup = wire.to_worker.decode(read_frame(sys.stdin.buffer.read))
{before}
tell(wire.Ready(3, "digest", "version"))
while (frame := read_frame(sys.stdin.buffer.read)) is not None:
    ask = wire.to_worker.decode(frame)
    {play}
"""
PLAYS = "tell(wire.Played(ask.episode, float(ask.seed)))"


def pool(
    folder: Path, play: str = PLAYS, before: str = "", said: list[str] | None = None, **more: Any
) -> EnvironmentPool:
    program = folder / "worker.py"
    program.write_text(textwrap.dedent(PROGRAM).format(play=play, before=before))
    say: Callable[[str], None] = (said if said is not None else []).append
    return EnvironmentPool(SETUP, argv=(str(program),), python=Path(sys.executable), say=say, **more)


def ask(name: str, seed: int = 1) -> wire.Play:
    return wire.Play(name, "key", 0, seed, {})


def all_of(one: EnvironmentPool, count: int, seconds: float = 60.0) -> list[wire.Played]:
    found: list[wire.Played] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += one.poll(0.5)
    return found


def test_episodes_are_played_side_by_side_and_each_comes_once(tmp_path: Path) -> None:
    with pool(tmp_path, count=2, concurrency=2) as one:
        assert (one.ready.tasks, one.ready.digest) == (3, "digest")
        for number in range(7):
            one.play(ask(f"e{number}", number))
        found = all_of(one, 7)
        assert sorted((p.episode, p.reward) for p in found) == [(f"e{n}", float(n)) for n in range(7)]
        assert one.under_way == 0


def test_the_episodes_of_a_worker_that_is_killed_are_played_by_another_as_they_were_asked(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    once = tmp_path / "once"
    play = f"""
    if ask.episode == "kills" and not os.path.exists({str(once)!r}):
        open({str(once)!r}, "x").close()
        os.kill(os.getpid(), 9)
    tell(wire.Played(ask.episode, float(ask.seed)))
    """
    with pool(tmp_path, play, said=said) as one:
        one.play(ask("kills", 5))
        one.play(ask("beside", 6))
        assert {p.episode: p.reward for p in all_of(one, 2)} == {"kills": 5.0, "beside": 6.0}
        assert one.losses == 1
    assert "exit status -9" in said[0]


def test_an_episode_that_ends_each_worker_is_given_up_and_the_others_are_not(tmp_path: Path) -> None:
    play = """
    if ask.episode == "kills":
        os._exit(3)
    tell(wire.Played(ask.episode))
    """
    with pool(tmp_path, play) as one:
        one.play(ask("fine"))
        one.play(ask("kills"))
        found = {p.episode: p.error for p in all_of(one, 2)}
        assert found["fine"] == ""
        assert "lost 5 times" in found["kills"]
        assert (one.losses, one.resumed) >= (5, 4), "each loss but the last gave it to another worker"


@pytest.mark.parametrize("effects", ["none", "external"])
def test_a_failure_after_a_loss_is_final_where_tools_have_effects_outside(
    effects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lost worker had asked, nobody knows: another try would ask it again."""
    monkeypatch.setitem(globals(), "SETUP", msgspec.structs.replace(SETUP, effects=effects))
    once = tmp_path / "once"
    play = f"""
    if ask.episode == "fails" and not os.path.exists({str(once)!r}):
        open({str(once)!r}, "x").close()
        os.kill(os.getpid(), 9)
    if ask.episode == "kills":
        os._exit(3)
    tell(wire.Played(ask.episode, error="failed"))
    """
    with pool(tmp_path, play, count=1, concurrency=1) as one:
        for name in ("fails", "untouched", "kills"):
            one.play(ask(name))
        found = {p.episode: p.final for p in all_of(one, 3)}
    external = effects == "external"
    assert found == {"fails": external, "untouched": False, "kills": external}


def test_a_worker_finds_programs_beside_its_interpreter_such_as_uv_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    wanted = f"/usr/bin:/bin:{Path(sys.executable).parent}"
    with pool(tmp_path, f"tell(wire.Played(ask.episode, float(os.environ['PATH'] == {wanted!r})))") as one:
        one.play(ask("a"))
        [played] = all_of(one, 1)
        assert played.reward == 1.0


def test_a_worker_that_is_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    with pool(tmp_path) as one:
        [before] = one.pids
        os.kill(before, signal.SIGKILL)
        one.play(ask("after"))
        assert [p.episode for p in all_of(one, 1)] == ["after"]
        assert one.pids != [before]


def test_an_environment_that_cannot_be_loaded_is_told_before_the_run_starts(tmp_path: Path) -> None:
    before = 'tell(wire.Ready(error="no such package", remedy="install it", output="words")); sys.exit(2)'
    with pytest.raises(ConfigError, match="no such package") as found, pool(tmp_path, before=before):
        pass
    assert found.value.remedy == "install it"


def test_a_worker_that_ends_before_it_is_ready_is_no_loop_without_end(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="exit status 4"), pool(tmp_path, before="os._exit(4)"):
        pass


@pytest.mark.parametrize("long_s", [0.0, 60.0])
def test_only_workers_that_play_for_moments_are_lost_in_vain(
    long_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes of minutes, of whose workers one after another is killed from outside before any is over."""
    monkeypatch.setattr("trainer.episodes.pool.PLAYED_S", long_s)
    monkeypatch.setattr("trainer.episodes.pool.MOST_LOST", 100)
    over = tmp_path / "over"
    play = f"""
    open(f"{tmp_path}/{{os.getpid()}}.began", "x").close()
    while not os.path.exists({str(over)!r}):
        time.sleep(0.01)
    tell(wire.Played(ask.episode, float(ask.seed)))
    """

    def lose(one: EnvironmentPool) -> None:
        [pid] = one.pids
        deadline = time.monotonic() + 60.0
        while not (tmp_path / f"{pid}.began").exists():
            one.poll(0.01)
            assert time.monotonic() < deadline
        os.kill(pid, signal.SIGKILL)
        while one.pids == [pid]:
            one.poll(0.01)

    with pool(tmp_path, play) as one:
        one.play(ask("long", 5))
        for _ in range(MOST_VAIN):
            lose(one)
        if long_s:
            with pytest.raises(RewardError, match="before they play anything to its end"):
                lose(one)
            return
        lose(one)
        over.touch()
        assert [(played.episode, played.reward) for played in all_of(one, 1)] == [("long", 5.0)]


def test_workers_end_with_their_pool(tmp_path: Path) -> None:
    with pool(tmp_path, count=2) as one:
        pids = one.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
