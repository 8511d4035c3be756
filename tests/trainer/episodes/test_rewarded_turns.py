"""A turn's reward on its whole way: a real environment worker, gateway and daemon, the run's scoring, rows, and the ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from scavenger.config import AlgorithmSection, RewardSection
from scavenger.gateway import identity
from scavenger.protocol import messages
from tests.gateway.conftest import SECRET, LiveGateway, worker
from tests.gateway.conftest import live as live  # the fixture
from tests.router import harness
from tests.router.harness import SPEC
from trainer.algorithms.scoring import Scoring
from trainer.data.batching import TrainRow
from trainer.episodes import wire
from trainer.episodes.opening import EpisodeScorer
from trainer.episodes.pool import EnvironmentPool
from trainer.episodes.run import EpisodeRun, PlaySettings
from trainer.tasks import calculator

TASK, EACH = 2, 6
HOW = messages.Sampling(EACH, 1.0, 1.0, 0, (0,))
TERMS = calculator.task(TASK)
STEPS = calculator.turns_of(TERMS)
#: Two right steps and a wrong answer; the right answer at once.
SAID = (STEPS[0], STEPS[1], "=00", STEPS[-1])


class Keys:
    """The gateway's part in `EpisodeRun`: keys, without HTTP."""

    def begin(self, episode: str) -> str:
        return identity.episode_key(SECRET, episode)

    def check(self) -> None: ...


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says these words, one sample after another."""
    order: dict[int, int] = {}

    def token(sample_id: int, position: int) -> int:
        words = SAID[order.setdefault(sample_id, len(order))]
        return calculator.ALPHABET.index(words[position] if position < len(words) else "<eos>")

    monkeypatch.setattr(harness, "token", token)


def setup(live: LiveGateway, folder: Path) -> wire.Setup:
    folder.mkdir()
    calculator.write_tokenizer(folder)
    where = str(live.http.base_url)
    return wire.Setup(
        "builtin:calculator-steps",
        "{}",
        "{}",
        str(folder),
        "r",
        SPEC.context_length,
        where,
        "branch",
        0,
        0,
        120.0,
    )


def played(live: LiveGateway, playing: EnvironmentPool) -> tuple[EpisodeRun, messages.GroupDone]:
    parts: Any = live.run
    run = EpisodeRun(parts, playing, Keys(), PlaySettings(7, 0, True, False, "v"))
    run.submit(1, 1, [messages.GroupSpec(0, b"", 2, HOW, f'{{"task": {TASK}}}')])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for group in run.poll(1.0):
            return run, group
    raise AssertionError("no group came")


def scored(
    run: EpisodeRun, group: messages.GroupDone
) -> tuple[tuple[TrainRow, ...], list[messages.SampleOutcome]]:
    said: list[str] = []
    scoring = Scoring(
        EpisodeScorer("v"),
        calculator.tokenizer(),
        RewardSection(),
        AlgorithmSection(name="dr_grpo"),
        said.append,
        EACH,
        episodes=run,
    )
    found = scoring.score(group)
    assert not said
    return found.rows, list(found.outcomes)


def test_a_turn_s_reward_reaches_its_row_and_the_ledger_and_is_the_same_when_it_is_played_again(
    live: LiveGateway, tmp_path: Path, says: None
) -> None:
    """Earned from each turn on: 0.5, 0.25, 0 and, in the other, 0.25; after its end its outcome, which is 0."""
    given = setup(live, tmp_path / "calculator")
    with worker(live.daemon), EnvironmentPool(given, concurrency=1) as pool:
        first, group = played(live, pool)
        assert [(s.reward, s.error) for s in group.samples] == [(0.5, None), (0.25, None)]
        rows, outcomes = scored(first, group)
        assert [row.turns for row in rows] == [((EACH, 0.125), (EACH, 0.125), (EACH, 0.0)), ((EACH, -0.125),)]
        again, same = played(live, pool)  # a trainer that starts anew: from the ledger, no token is generated
        assert (same.samples, scored(again, same)) == (group.samples, (rows, outcomes))
        again.commit(1, 1, outcomes, {})
    found = live.daemon.query(
        "SELECT e.name, t.number, t.reward, s.reward, s.advantage, s.state FROM v_turns t JOIN v_samples s ON s.group_id = t.group_id "
        "JOIN v_episodes e ON e.episode_id = t.episode_id ORDER BY e.name, t.number"
    )
    assert found == [
        ("train-1.0.0.0", 1, 0.25, 0.5, 0.125, "consumed"),
        ("train-1.0.0.0", 2, 0.25, 0.5, 0.125, "consumed"),
        ("train-1.0.0.0", 3, 0.0, 0.5, 0.0, "consumed"),
        ("train-1.0.1.0", 1, 0.25, 0.25, -0.125, "consumed"),
    ]
