"""What peers say can make a policy fail, and a message too large: one run's trouble, never the daemon's end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from scavenger.config import RouterSection
from scavenger.daemon import main
from scavenger.errors import WireError
from scavenger.ledger.read import history
from scavenger.policy import interface as seam
from scavenger.policy.fallback import PolicyWithFallback, with_fallback
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import Standard, StepView
from scavenger.policy.predictive.policy import Predictive
from scavenger.protocol import messages
from scavenger.router.core import runs, steps
from tests.plain_view import PlainView
from tests.router.harness import SOURCE, Bench, root, started


class Weighing(Standard):
    def benefit(self) -> Benefit | None:
        return Benefit(0.1, 8.0, 1, 60.0)


class Broken(Standard):
    def observe(self, fact: seam.Fact, now: float) -> None:
        raise ZeroDivisionError

    def engines(self, view: seam.RunView, now: float) -> tuple[int, str]:
        return 7, "still whole"


def test_a_policy_that_fails_is_replaced_once_and_told() -> None:
    told: list[tuple[str, str]] = []
    policy = with_fallback(
        lambda _run: Broken(), lambda run, error: told.append((run, type(error).__name__))
    )("r")
    view = PlainView(step=StepView(step=1, samples=8))
    assert policy.engines(view, 0.0) == (7, "still whole")
    for _ in range(3):
        policy.observe(seam.Toggled(1, True, 1.0), 0.0)
    assert told == [("r", "ZeroDivisionError")]
    assert policy.engines(view, 0.0)[0] == 1
    assert (policy.place(view, 0.0), policy.rebalance(view, 0.0), policy.window(view, 0.0)) == ([], (), None)


def test_a_guarded_policy_says_what_an_engine_is_worth_if_it_knows() -> None:
    assert PolicyWithFallback("r", Weighing(), lambda *_: None).benefit() == Benefit(0.1, 8.0, 1, 60.0)
    assert PolicyWithFallback("r", Standard(), lambda *_: None).benefit() is None


def test_a_fault_of_the_standard_policy_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standard, "observe", Broken.observe)
    with pytest.raises(ZeroDivisionError):
        PolicyWithFallback("r", Standard(), lambda *_: None).observe(seam.Toggled(1, True, 1.0), 0.0)


@pytest.mark.parametrize(
    "bad",
    [{"seconds_train": -1.0}, {"seconds_update": -1.0}, {"seconds": math.nan, "seconds_publish": -math.inf}],
)
def test_times_that_cannot_be_reach_no_policy(bad: dict[str, float]) -> None:
    kept = steps._seconds_are_times(bad | {"loss": -1.0})
    assert kept == {"loss": -1.0}
    Predictive("r").observe(seam.StepFinished(1, "train", kept), 1.0)


def test_lengths_below_zero_and_endless_stop_texts_are_no_messages() -> None:
    good = messages.encode(messages.Heartbeat((messages.Held(1, 1, 5),), 1, 1))
    assert isinstance(messages.decode_to_daemon(good), messages.Heartbeat)
    with pytest.raises(WireError):
        messages.decode_to_daemon(messages.encode(messages.Heartbeat((messages.Held(1, 1, -(10**9)),), 1, 1)))
    many = messages.GroupSpec(0, messages.pack_tokens([1]), 1, messages.Sampling(4, stop=("x",) * 65))
    with pytest.raises(WireError):
        messages.decode_to_daemon(
            messages.encode(messages.Call(1, "r", 1, messages.SubmitGroups(1, 1, "train", (many,))))
        )


def test_a_manifest_that_no_engine_could_be_sent_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = started()
    monkeypatch.setattr(runs, "MAX_MANIFEST_BYTES", 4)
    body = messages.PublishVersion(2, 1, root(2), b"12345", (SOURCE,))
    run = next(iter(bench.router.core.runs.values()))
    answer = runs._publish(bench.router.core, run, body)
    assert isinstance(answer, messages.Denied)
    assert "a manifest of 5 bytes" in answer.reason


def a_rank(number: int, more: str = "") -> messages.WeightSource:
    return messages.WeightSource(f"tcp://node{number:05}:40000{more}", "k" * 40, b"t" * 32, complete=False)


def published_by(count: int, more: str = "") -> tuple[object, Bench]:
    bench = started()
    (run,) = bench.router.core.runs.values()
    sources = tuple(a_rank(number, more) for number in range(count))
    body = messages.PublishVersion(run.weights.next_version, 1, root(9), b"manifest", sources)
    return runs._publish(bench.router.core, run, body), bench


def test_thousands_of_ranks_may_announce_weights_and_an_engine_can_be_sent_all_of_them() -> None:
    """With a manifest as large as may be, twice: of adapters and of their base."""
    answer, bench = published_by(runs.MAX_SOURCES)
    assert isinstance(answer, messages.Ok)
    (run,) = bench.router.core.runs.values()
    sources = run.weights.versions[run.weights.next_version - 1].sources
    assert len(sources) == runs.MAX_SOURCES == 4096
    most = bytes(runs.MAX_MANIFEST_BYTES)
    order = messages.UseWeights(2, most, sources, base=messages.BaseWeights(1, most, sources))
    assert messages.decode_to_worker(messages.encode(order)) == order


@pytest.mark.parametrize(("count", "more"), [(runs.MAX_SOURCES + 1, ""), (1100, "x" * 4000)])
def test_more_ranks_than_an_engine_can_be_sent_are_denied_with_a_remedy(count: int, more: str) -> None:
    answer, _ = published_by(count, more)
    assert isinstance(answer, messages.Denied)
    assert f"{count:,} sources" in answer.reason
    assert "trainer.replicas" in answer.remedy


def test_a_past_that_makes_no_sense_leaves_a_policy_with_its_priors(monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(*_: Any) -> Any:
        raise TypeError("'>' not supported between instances of 'NoneType' and 'int'")

    monkeypatch.setattr(history, "read", nonsense)
    bench = started()
    run = next(iter(bench.router.core.runs.values()))
    before = run.policy
    here: Any = SimpleNamespace(
        config=SimpleNamespace(router=RouterSection()), _policy_failed=lambda *_: None
    )
    server: Any = SimpleNamespace(router=bench.router, post=bench.handle)
    main.Daemon._warm_start(here, server, SimpleNamespace(engine=None))  # type: ignore[arg-type]  # a writer's one member
    assert run.policy is before
