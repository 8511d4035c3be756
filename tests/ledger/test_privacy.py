"""What a model, a prompt or a reward function said reaches nobody who may only read what happened, and a purge leaves none of it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rollout.engines.reference import ReferenceEngine
from rollout.worker import spawn
from scavenger import client
from scavenger.config import AlgorithmSection, RewardSection
from scavenger.errors import ConfigError, RewardError, describe
from scavenger.ledger import records as r
from scavenger.ledger import redaction, store
from scavenger.ledger.maintain import purge
from scavenger.ledger.redaction import OTHER
from scavenger.protocol import messages
from tests.ledger.examples import T0, prologue, written
from tests.ledger.histories import answers, ended, fetch, training
from tests.ledger.test_roles import DAEMON, Site, made_site
from tests.router.harness import SPEC, Bench, chunk_of, specs
from tests.router.memory_ledger import StoredLedger
from trainer.__main__ import close_failed
from trainer.algorithms.advantages import Advantages, batch_normalised, grpo
from trainer.algorithms.rewards import RewardRunner
from trainer.algorithms.scoring import ENDED_BY_LENGTH, Scoring
from trainer.episodes.delivered import OVER
from trainer.loop.metrics import Capacity, Judgement, TokenSources, summarise, summarise_evaluation

SECRET = "swordfish"
#: A judge that quotes all it was given, as many do.
JUDGE = """
def quotes(prompt, completion, meta):
    raise ValueError(f"cannot judge {completion!r} of {prompt!r}, wanted {meta['answer']!r}")
"""
TRAINER, WORKER = 1, 11


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quoting.py").write_text(JUDGE)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site | str]:
    """An empty ledger: a SQLite file, or a database of PostgreSQL with the daemon's role."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite3'}"
        return
    with made_site(request.getfixturevalue("postgres")) as made:
        yield made


def owner(place: Site | str) -> str:
    return place if isinstance(place, str) else place.url(DAEMON)


def reader(place: Site | str) -> str:
    """The ledger as somebody sees it who may read what happened."""
    if isinstance(place, str):
        return place
    done = place.grant()
    assert (done.returncode, done.stderr) == (0, "")
    return place.url("scavenger_read")


def said(url: str, kind: str) -> dict[str, str]:
    """All that a ledger's tables ("table") or views ("view") show, by name: bytes too, as the text that they may hold."""
    engine = store.open_readonly(url)
    try:
        inspector = sa.inspect(engine)
        found = (
            inspector.get_table_names()
            if kind == "table"
            else [name for name in inspector.get_view_names() if name.startswith("v_")]
        )
        if engine.dialect.name == "postgresql" and kind == "view":
            found.remove("v_sample_tokens")
        with engine.connect() as connection:
            return {
                name: "\n".join(map(_text, connection.execute(sa.text(f"SELECT * FROM {name}"))))
                for name in found
            }
    finally:
        engine.dispose()


def _text(row: Any) -> str:
    return " ".join(value.decode("latin-1") if isinstance(value, bytes) else str(value) for value in row)


def naming(url: str, kind: str, word: str = SECRET) -> list[str]:
    return [name for name, text in said(url, kind).items() if word in text]


class Play:
    """A real core and ledger, and the trainer's own way from a completed group to the end of its run. `log`: what the trainer printed."""

    def __init__(self, url: str) -> None:
        self.log: list[str] = []
        self.bench = Bench()
        self.bench.ledger = self.ledger = StoredLedger(url)
        # Every token is a word that must not be seen, in the prompt as in the answers.
        self.tokenizer = Tokenizer(WordLevel({f"{SECRET}{n}": n for n in range(97)}, unk_token=f"{SECRET}0"))
        self.bench.open(on_poison="mask", poison_after=1)
        self.bench.publish()

    def groups(self, step: int, purpose: str = "train") -> list[messages.GroupDone]:
        meta = json.dumps({"answer": SECRET})
        spec = messages.GroupSpec(0, specs(1)[0].prompt, 2, messages.Sampling(8, stop_token_ids=(0,)), meta)
        self.bench.submit(step, 1, (spec,), purpose)
        for lease in self.bench.leases(WORKER) or self.bench.join(WORKER):
            self.bench.say(
                WORKER, messages.Chunks((chunk_of(lease.sample_id, lease.epoch, 1, 0, 8, "length"),))
            )
        return self.bench.take(TRAINER, messages.GroupDone)

    def scoring(self, runner: RewardRunner, on_error: str) -> Scoring:
        reward = RewardSection.model_validate({"on_reward_error": on_error})
        return Scoring(runner, self.tokenizer, reward, AlgorithmSection(), self.log.append)

    def close(self, error: BaseException) -> None:
        """As `trainer.__main__` does when its loop ended with `error`."""
        run = SimpleNamespace(call=self.bench.call, _closing=False)
        run.close_run = lambda state, reason: client.Run.close_run(run, state, reason)  # type: ignore[arg-type]
        close_failed(run, error)  # type: ignore[arg-type]
        self.log.append(str(error))


def raised_by(scoring: Scoring, group: messages.GroupDone) -> RewardError:
    with pytest.raises(RewardError) as caught:
        scoring.score(group)
    return caught.value


@pytest.mark.usefixtures("judge")
def test_a_reward_that_quotes_the_answer_is_seen_by_no_reader_and_purged(place: Site | str) -> None:
    url = owner(place)
    play = Play(url)
    with RewardRunner("quoting:quotes", timeout_s=10.0, retries=0) as runner:
        (group,) = play.groups(1)
        scored = play.scoring(runner, "mask").score(group)
        assert {outcome.outcome for outcome in scored.outcomes} == {"masked"}
        assert isinstance(
            play.bench.call(messages.CommitStep(1, 1, "train", scored.outcomes, {})), messages.Ok
        )
        (group,) = play.groups(1, "eval")
        whys = [(s.sample_id, why) for s, _, why in play.scoring(runner, "mask").rewards(group)]
        outcomes = tuple(
            messages.SampleOutcome(number, "masked", math.nan, 0.0, messages.words(why))
            for number, why in whys
        )
        assert isinstance(play.bench.call(messages.CommitStep(1, 1, "eval", outcomes, {})), messages.Ok)
        (group,) = play.groups(2)
        play.close(raised_by(play.scoring(runner, "stop"), group))
    play.ledger.close()

    assert sum(SECRET in line for line in play.log) == len(play.log) == 5, (
        "whose run it is reads what the function said"
    )
    assert naming(url, "table") == ["groups"], "the prompts' metadata hold it, and no reason does"
    ((why,),) = fetch(url, "SELECT reason FROM runs")
    assert "sample 5: reward function quoting:quotes failed 1 times: it raised ValueError" in str(why)
    reasons = fetch(url, "SELECT DISTINCT reason FROM samples WHERE state = 'masked'")
    assert reasons == [("reward function quoting:quotes failed 1 times: it raised ValueError",)]
    seen = said(reader(place), "view")
    assert "quoting:quotes" in seen["v_runs"]
    assert [name for name, text in seen.items() if SECRET in text] == []

    purge.purge(url, "r")
    assert naming(url, "table") == []
    if isinstance(place, str):
        left = b"".join(file.read_bytes() for file in Path(place.removeprefix("sqlite:///")).parent.iterdir())
        assert SECRET.encode() not in left


def test_the_words_of_another_s_trainer_do_not_enter_reasons_versions_and_names_of_metrics(
    place: Site | str,
) -> None:
    url, quote, word = (
        owner(place),
        f"cannot judge '{SECRET}'",
        f"{SECRET}-7",
    )  # a sentence, and what looks like a name
    play = Play(url)
    (group,) = play.groups(1)
    consumed, filtered = (
        messages.SampleOutcome(sample.sample_id, outcome, 1.0, 0.0, quote, version)
        for sample, outcome, version in zip(
            group.samples, ("consumed", "filtered"), (quote, word), strict=True
        )
    )
    as_metrics = {"reward": 0.5, quote: 1.0, "seconds": math.nan, word: 2.0}
    assert isinstance(
        play.bench.call(messages.CommitStep(1, 1, "train", (consumed, filtered), as_metrics)), messages.Ok
    )
    (group,) = play.groups(1, "eval")
    outcomes = tuple(
        messages.SampleOutcome(sample.sample_id, "evaluated", 1.0, 0.0, quote, "judge:v1@abc")
        for sample in group.samples
    )
    assert isinstance(
        play.bench.call(messages.CommitStep(1, 1, "eval", outcomes, {"eval_greedy": 1.0})), messages.Ok
    )
    (group,) = play.groups(2)
    known = "zero variance: every reward is -0.5"
    outcomes = tuple(
        messages.SampleOutcome(sample.sample_id, "filtered", -0.5, 0.0, known, "judge:v1@abc")
        for sample in group.samples
    )
    assert isinstance(
        play.bench.call(messages.CommitStep(2, 1, "train", outcomes, {"loss": 1.0})), messages.Ok
    )
    assert isinstance(play.bench.call(messages.CloseRun("finished", quote)), messages.Ok)
    play.ledger.close()

    for name, text in said(reader(place), "view").items():
        assert quote not in text or name == "v_runs", name
    assert set(fetch(url, "SELECT DISTINCT reason FROM samples")) == {(OTHER,), (known,)}
    versions = {str(version) for (version,) in fetch(url, "SELECT DISTINCT reward_version FROM sample_ends")}
    assert "judge:v1@abc" in versions, "what looks like a version stays as it is"
    assert len(versions) == 3
    assert [
        set(json.loads(str(text))) for (text,) in fetch(url, "SELECT metrics FROM steps ORDER BY id")
    ] == [{"reward", word, redaction._digest("metric", quote)}, {"eval_greedy"}, {"loss"}]

    purge.purge(url, "r")
    assert naming(url, "table") == []
    assert set(fetch(url, "SELECT DISTINCT reason FROM samples")) == {(OTHER,), (known,)}, (
        "our own words stay"
    )
    after = {str(version) for (version,) in fetch(url, "SELECT DISTINCT reward_version FROM sample_ends")}
    assert len(after) == 3, "the samples that one function judged are known as such"
    assert all(version.startswith("version-") for version in after)
    before = fetch(url, "SELECT reason, reward_version, metrics FROM sample_ends, steps")
    purge.purge(url, "r")
    assert fetch(url, "SELECT reason, reward_version, metrics FROM sample_ends, steps") == before, (
        "again, nothing changes"
    )
    if isinstance(place, str):
        left = b"".join(file.read_bytes() for file in Path(place.removeprefix("sqlite:///")).parent.iterdir())
        assert SECRET.encode() not in left


def test_a_function_whose_version_is_another_for_each_sample_is_purged_without_a_statement_for_each(
    url: str,
) -> None:
    samples = [
        r.SampleEnded(501 + n, "consumed", "", 5, 1, 1.0, 0.0, T0 + 21, f"{SECRET}{n}") for n in range(100)
    ]
    grown = r.GroupCreated(500, 1, "train", 5, 9, 0, 1, b"\1\0\0\0", 100, 501, "{}", "", T0)
    written(url, [[*prologue(), grown], [*samples], [r.RunEnded(1, "failed", "", T0)]])
    assert naming(url, "table") != []
    purge.purge(url, "sorting")
    assert naming(url, "table") == []
    assert fetch(url, "SELECT DISTINCT reward_version FROM samples") == [("purged",)]


def test_our_own_trainer_says_only_what_is_known() -> None:
    assert set(summarise([], {}, divisor=0.0)) <= redaction.METRICS
    assert set(TokenSources().as_metrics(1.0) | Capacity(1, 1, 1, 0.0).as_metrics()) <= redaction.METRICS
    answers = [Judgement(1.0, 3, cut=False)] * 9
    assert set(summarise_evaluation([answers], [answers])) <= redaction.METRICS
    assert redaction.is_known(ENDED_BY_LENGTH)
    assert redaction.is_known(OVER)
    for rewards in ([0.5, 0.5], [1e-7, 1e-7], [1e20, 1e20], [0.0, 1.0]):
        values = torch.tensor(rewards, dtype=torch.float64)
        for usable in ([True, True], [True, False], [False, False]):
            mask = torch.tensor(usable)
            found: list[Advantages] = [grpo(values, mask, True), *batch_normalised([(values, mask)], True)]
            assert all(one.informative or redaction.is_known(one.reason) for one in found), found


def engine_error() -> str:
    """What an engine whose library quotes the prompt has its worker say."""

    async def dies() -> str:
        def load(tensors: object, *, summed: bool) -> None:
            raise IndexError(f"{SECRET} is not in the vocabulary")

        loop = asyncio.get_running_loop()
        words: asyncio.Future[str] = loop.create_future()
        with ThreadPoolExecutor(1) as executor:
            engine = ReferenceEngine(SPEC, SimpleNamespace(load=load), executor)  # type: ignore[arg-type]

            async def loads() -> None:
                await engine.load(1, [])

            task = spawn(loads(), words.set_result)
            async with asyncio.timeout(10):
                await asyncio.wait([task])
                return await words

    return asyncio.run(dies())


def test_an_engine_or_trainer_that_fails_with_the_prompt_in_its_words_tells_type_and_place(
    place: Site | str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = owner(place)
    play = Play(url)
    play.bench.submit()
    play.bench.join(WORKER)
    reason = engine_error()
    assert "IndexError at test_privacy.py:" in reason
    assert SECRET in capsys.readouterr().out, "the worker's log has it whole"
    play.bench.say(WORKER, messages.Goodbye(messages.words(reason), notice=False, failed=True))
    with pytest.raises(KeyError) as caught:
        dict[str, str]()[SECRET]
    play.close(caught.value)
    play.ledger.close()
    seen = said(reader(place), "view")
    assert "IndexError" in seen["v_leases"]
    assert "IndexError" in seen["v_workers"]
    assert "KeyError at test_privacy.py:" in seen["v_runs"]
    assert [name for name, text in seen.items() if SECRET in text] == []
    assert naming(url, "table") == []


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_the_words_of_another_s_trainer_and_of_earlier_releases_are_purged_too(url: str, state: str) -> None:
    masked = [
        r.SampleReopened(501, 1, T0 + 20),
        r.SampleEnded(501, "masked", f"no judge for {SECRET}", 5, 1, None, None, T0 + 21),
        r.SampleEnded(
            502, "filtered", f"all alike: {SECRET}", 5, 1, 0.0, None, T0 + 21, f"judge of {SECRET}"
        ),
        r.StepCommitted(1, 9, "eval", 1, 1, json.dumps({"reward": 1.0, f"is it {SECRET}?": None}), T0 + 22),
        r.RunEnded(1, state, f"ValueError: {SECRET}", T0 + 24),
    ]
    written(url, [*training(), *([record] for record in masked)])
    assert sorted(naming(url, "table")) == ["runs", "sample_ends", "samples", "steps"]
    before = answers(url, without=["runs"])
    purge.purge(url, "sorting")
    assert naming(url, "table") == []
    assert answers(url, without=["runs"]) == before
    assert fetch(url, "SELECT state, reason FROM runs") == [(state, "purged")]
    assert fetch(url, "SELECT DISTINCT reason FROM samples WHERE state = 'masked'") == [("purged",)]


def test_a_purge_leaves_the_programs_own_words(url: str) -> None:
    written(url, [*training(), ended()])
    reasons = "SELECT reason FROM leases UNION ALL SELECT reason FROM sample_ends UNION ALL SELECT reason FROM workers"
    before = sorted(fetch(url, reasons))
    purge.purge(url, "sorting")
    assert sorted(fetch(url, reasons)) == before
    assert fetch(url, "SELECT reason FROM runs") == [("",)]


def test_what_may_be_told_of_an_error() -> None:
    quoting = ConfigError("it failed", "mend it", quoted=SECRET)
    assert str(quoting) == f"it failed: {SECRET}\n  remedy: mend it"
    assert describe(quoting) == "it failed\n  remedy: mend it"
    assert describe(ValueError(SECRET)) == "ValueError"
