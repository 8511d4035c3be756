"""What the core answers to trainers. The bench commits at once unless a test turns `auto` off."""

from __future__ import annotations

import msgspec
import pytest

from scavenger.errors import WireError
from scavenger.ledger.records import CheckpointRecorded
from scavenger.protocol.messages import (
    MAX_CONFIG_CHARS,
    Accepted,
    Assign,
    Call,
    CloseRun,
    Denied,
    Drain,
    Fleet,
    Goodbye,
    GroupSpec,
    HelloAgain,
    Ok,
    Ping,
    Pong,
    PublishVersion,
    RecordCheckpoint,
    Reply,
    RunOpened,
    Sampling,
    SetReserved,
    SubmitGroups,
    WeightsLoaded,
    decode_to_daemon,
    encode,
    pack_tokens,
)
from scavenger.router.core.events import PeerIdentity, TrainerCalled
from tests.router.harness import OWNER, SOURCE, Bench, open_body, root, specs, started
from tests.router.moves import W1, W2, consumed_step, finish_all

# ---------------------------------------------------------------- calls


def test_every_call_may_be_repeated() -> None:
    bench = started(n=1)
    assert isinstance(bench.publish(), Ok)
    assert bench.submit(groups=specs(1, 1)) == bench.submit(groups=specs(1, 1)) == Accepted((1,))
    assert len(bench.ledger.groups) == 1
    finish_all(bench, W1, bench.join(W1))
    for _ in range(2):
        assert isinstance(bench.commit_step(1, [1]), Ok)
        assert isinstance(bench.call(RecordCheckpoint(1, 1, root(1), "/c")), Ok)
        assert isinstance(bench.call(SetReserved(False)), Ok)
        assert isinstance(bench.attach(), Ok)
        assert isinstance(bench.call(Ping()), Pong)
    assert bench.ledger.samples[1].ends == ["consumed"]
    for _ in range(2):
        assert isinstance(bench.call(CloseRun("finished")), Ok)
    assert sum(type(r).__name__ == "RunEnded" for r in bench.ledger.log) == 1
    assert len(bench.take(W1, Drain)) == 1


def test_the_ledger_has_the_steps_that_a_checkpoint_says_are_kept() -> None:
    bench = started(n=1)
    assert isinstance(bench.call(RecordCheckpoint(4, 1, root(1), "/c", (4, 2, 4))), Ok)
    assert isinstance(bench.call(RecordCheckpoint(4, 1, root(1), "/c")), Ok)  # an older trainer's
    refused = bench.call(RecordCheckpoint(4, 1, root(1), "/c", (2,)))
    assert isinstance(refused, Denied)
    assert "not among those kept" in refused.reason
    assert [r.kept for r in bench.ledger.log if isinstance(r, CheckpointRecorded)] == ["[2,4]", ""]


def test_a_peer_that_knows_nothing_of_kept_checkpoints_is_understood() -> None:
    frame = msgspec.msgpack.decode(encode(Call(1, "run", 1, RecordCheckpoint(4, 1, b"root", "/c", (2, 4)))))
    assert frame["body"].pop("kept") == [2, 4]
    decoded = decode_to_daemon(msgspec.msgpack.encode(frame))
    assert isinstance(decoded, Call)
    assert decoded.body == RecordCheckpoint(4, 1, b"root", "/c", None)


@pytest.mark.parametrize("name", ["", "a b", "r\n", "r\0", "../r", "x" * 65])
def test_a_call_for_a_name_that_no_job_can_carry_is_no_message(name: str) -> None:
    with pytest.raises(WireError):
        decode_to_daemon(encode(Call(1, name, 0, Ping())))


def test_a_run_is_opened_under_the_name_that_its_call_has() -> None:
    bench = Bench()
    bench.handle(TrainerCalled(bench.trainer, OWNER, Call(1, "other", 0, open_body())))
    refused = bench.answer(1)
    assert isinstance(refused, Denied)
    assert "for run 'other' that names run 'r'" in refused.reason
    assert not [record for record in bench.ledger.log if type(record).__name__ == "RunCreated"]


def test_a_configuration_of_megabytes_is_no_message() -> None:
    """The daemon keeps it for as long as it knows the run: a user could fill its memory."""
    body = open_body()
    for large in (
        msgspec.structs.replace(body, config=" " * (MAX_CONFIG_CHARS + 1)),
        msgspec.structs.replace(
            body, engine=msgspec.structs.replace(body.engine, model_config=" " * (MAX_CONFIG_CHARS + 1))
        ),
    ):
        with pytest.raises(WireError):
            decode_to_daemon(encode(Call(1, "r", 0, large)))


@pytest.mark.parametrize(
    ("samples", "reason"),
    [([1], "1 samples of step 1 have no outcome"), ([1, 2, 2], "twice"), ([1, 2, 9], "does not belong")],
)
def test_a_commit_must_name_each_sample_of_its_step_exactly_once(samples: list[int], reason: str) -> None:
    bench = started()
    finish_all(bench, W1, bench.join(W1))
    answer = bench.commit_step(1, samples)
    assert isinstance(answer, Denied)
    assert reason in answer.reason
    assert bench.ledger.samples[1].state == "complete"
    assert isinstance(bench.commit_step(1, [1, 2]), Ok)


def test_a_commit_of_unfinished_samples_or_impossible_outcomes_is_refused() -> None:
    bench = started()
    assert isinstance(bench.commit_step(1, [1, 2]), Denied)
    finish_all(bench, W1, bench.join(W1))
    assert isinstance(bench.commit_step(1, [1, 2], outcome="evaluated"), Denied)
    assert isinstance(bench.commit_step(7, [1, 2]), Denied)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ((GroupSpec(0, pack_tokens([1] * 60), 2, Sampling(8)),), "over the engine's context of 64"),
        ((GroupSpec(0, b"", 2, Sampling(8)),), "has no tokens"),
        ((GroupSpec(0, pack_tokens([1]), 0, Sampling(8)),), "asks for 0 samples"),
        ((GroupSpec(0, pack_tokens([1]), 1, Sampling(0)),), "of 0 tokens"),
        (
            (GroupSpec(0, pack_tokens([1]), 2, Sampling(8), meta="m" * 2**24),),
            "completions may make a message of",
        ),
        (
            (GroupSpec(0, pack_tokens([1]), 4097, Sampling(1)),),
            "asks for 4,097 samples, over the 4,096 of one group",
        ),
        (
            tuple(GroupSpec(i, pack_tokens([1]), 4096, Sampling(1)) for i in range(5)),
            "20,480 samples in one SubmitGroups, over the 16,384",
        ),
        (specs(1) + specs(1), "names a prompt twice"),
    ],
)
def test_prompts_that_cannot_be_generated_are_refused_with_a_remedy(
    groups: tuple[GroupSpec, ...], reason: str
) -> None:
    bench = started()
    before = dict(bench.ledger.groups)
    answer = bench.submit(step=2, groups=groups)
    assert isinstance(answer, Denied)
    assert reason in answer.reason
    assert answer.remedy
    assert bench.ledger.groups == before


def test_steps_that_are_over_versions_that_were_used_and_ended_runs_take_nothing_more() -> None:
    bench = consumed_step()
    assert "not after the last committed one" in bench.submit(step=1).reason  # type: ignore[union-attr]
    assert "was used before" in bench.publish(1, root_of=5).reason  # type: ignore[union-attr]
    assert "was not published" in bench.submit(step=2, version=9).reason  # type: ignore[union-attr]
    bench.call(CloseRun("finished"))
    assert "has ended" in bench.submit(step=2).reason  # type: ignore[union-attr]


def test_only_the_owner_may_act_as_a_trainer() -> None:
    bench = started()
    for who in (PeerIdentity("worker", "k", "r", "j"), PeerIdentity("owner", "another")):
        bench.handle(TrainerCalled(60, who, Call(1, "r", 1, Ping())))
        bench.handle(TrainerCalled(60, who, Call(2, "r", 0, open_body())))
    answers = [m.body for m in bench.take(60, Reply)]
    assert [a.code for a in answers] == ["not-owner"] * 4  # type: ignore[union-attr]
    assert bench.ledger.runs[1]["attempt"] == 1


def test_a_run_is_not_opened_again_as_another_one() -> None:
    bench = started()
    bench.call(replace_seed(8), conn=3)
    assert "seed 8" in bench.take(3, Reply)[0].body.reason  # type: ignore[union-attr]
    bench.call(open_body(5), conn=3)
    assert "the ledger ends at 0" in bench.take(3, Reply)[0].body.reason  # type: ignore[union-attr]


def replace_seed(seed: int):  # type: ignore[no-untyped-def]
    return msgspec.structs.replace(open_body(), seed=seed)


def test_a_call_over_an_unattached_connection_is_asked_to_attach() -> None:
    bench = started()
    for body in (Ping(), SubmitGroups(2, 1, "train", specs(1)), PublishVersion(2, 1, b"r", b"m", (SOURCE,))):
        assert bench.call(body, conn=9) is None
        assert len(bench.take(9, HelloAgain)) == 1


def test_the_trainer_hears_of_every_change_of_its_fleet() -> None:
    bench = started()
    bench.take(1, Fleet)
    bench.hello(W1)
    bench.hello(W2, kind="reserved")
    assert bench.take(1, Fleet)[-1] == Fleet(0, 1, 0, 2, 0, holding=("worker 2",)), (
        "a harvested worker that loads is no capacity yet"
    )
    bench.say(W2, WeightsLoaded(1, root(1)))
    bench.say(W1, WeightsLoaded(1, root(1)))
    bench.tick()
    assert bench.take(1, Fleet)[-1] == Fleet(1, 1, 0, 2, 2, holding=("worker 2",))
    bench.say(W1, Goodbye("SIGTERM", True))
    assert bench.take(1, Fleet)[-1].harvested == 0
    bench.tick(3)
    assert bench.take(1, Fleet) == []


def test_demand_says_how_many_engines_are_of_use_and_why() -> None:
    bench = Bench()
    assert bench.router.demand(bench.now) == []
    bench.open()

    def demand() -> tuple[int, str]:
        (wanted,) = bench.router.demand(bench.now)
        return wanted.engines, wanted.reason

    assert demand() == (0, "no weights are published yet")
    bench.publish()
    bench.submit(groups=specs(2, 2))
    assert demand()[0] == 4
    bench.submit(groups=specs(8, 2))
    assert demand()[0] == 8, "run.max_engines"
    bench.open(harvest=False)
    assert demand() == (0, "run.harvest = false")
    bench.open()
    bench.call(CloseRun("finished"))
    assert demand() == (0, "the run is over")


def test_environment_workers_are_wanted_while_the_trainer_lives() -> None:
    bench = Bench()

    def wanted(later: float = 0.0) -> list[int]:
        return [one.workers for one in bench.router.environments(bench.now + later)]

    bench.open(environment_jobs=3)
    assert wanted() == [3]
    gone_s = bench.router.core.limits.trainer_gone_s
    assert (wanted(gone_s), wanted(gone_s + 1)) == ([3], [])
    bench.call(CloseRun("finished"))
    assert wanted() == []


def test_a_trainer_whose_opening_is_overtaken_is_told_and_does_not_ask_again() -> None:
    """Unanswered it would repeat its OpenRun and fence the newer one; two that wait for a slow ledger would fence each other for ever."""
    bench = Bench(auto=False)
    assert bench.call(open_body(job_id=1), conn=1) is None
    assert bench.call(open_body(job_id=1), conn=2) is None  # the same trainer, over another connection
    assert bench.call(open_body(job_id=2), conn=3) is None
    assert bench.take(2, Reply) == [], "not before the newer attempt is durable"
    bench.settle()
    (told,) = bench.take(2, Reply)
    assert isinstance(told.body, Denied)
    assert told.body.code == "stale"
    assert "another trainer opened run 'r'" in told.body.reason
    assert bench.take(1, Reply) == []
    (opened,) = bench.take(3, Reply)
    assert isinstance(opened.body, RunOpened)
    assert opened.body.attempt == 2


def test_several_submissions_of_one_step_are_one_step() -> None:
    """As a client makes them of one that is over a call's bound: the fleet is sized for all, and the step is committed with all."""
    bench = started(n=1)
    finish_all(bench, W1, bench.join(W1))
    bench.commit_step(1, [1])
    many = specs(5, 2)
    first, second = bench.submit(2, groups=many[:3]), bench.submit(2, groups=many[3:])
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert bench.router.core.runs["r"].progress.samples == 10
    assert bench.submit(2, groups=many[:3]) == first, "a repeat of one part makes nothing anew"
    assert bench.router.core.runs["r"].progress.samples == 10
    lost = bench.commit_step(2, [2, 3, 4, 5, 6, 7])
    assert isinstance(lost, Denied)
    while any(not s.done for s in bench.router.core.samples.values()):
        leases = [lease for assign in bench.take(W1, Assign) for lease in assign.leases]
        assert leases
        finish_all(bench, W1, leases)
    assert isinstance(bench.commit_step(2, list(range(2, 12))), Ok)
