"""Grouped speculation in vLLM: its own rejection sampling verifies siblings' drafts, so distributions are kept and greedy tokens are equal.

One engine is started for all that needs one.
"""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.engines.base import EngineHost
from scavenger.errors import EngineError
from scavenger.protocol.messages import EngineSpec, SampleKey, Sampling
from scavenger.protocol.worker.events import Delta, GroupName, HearSiblings, Request, SiblingSaid, Speculated

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
from rollout.engines.speculation.automaton import ROOT  # noqa: E402
from rollout.engines.vllm import setup  # noqa: E402  needs torch, as all that follows
from rollout.engines.vllm.proposer import PATH, GroupProposer, expand, group_name, named, request_name  # noqa: E402
from rollout.engines.vllm.worker import _with_raw_logprobs_of_drafts  # noqa: E402
from tests.rollout.test_engine_contract import finish  # noqa: E402

VOCAB, LENGTH, COUNT, PROMPT = 5, 4, 4000, (2, 3)


def key(index: int, prompt: int = 0) -> SampleKey:
    return SampleKey("train-agents", 1, prompt, index)


def test_a_request_s_name_says_its_group_its_place_and_its_prompt() -> None:
    name = request_name(17, key(3), (1, 2, 3))
    assert named(f"{name}-a1b2c3d4") == named(name)
    found = named(name)
    assert found is not None
    assert (found.place, found.prompt) == (3, 3)
    assert named(request_name(18, key(4), (1, 2, 3))) == found._replace(place=4), "siblings"
    for other in (request_name(17, key(3, prompt=1), (1, 2, 3)), request_name(17, key(3), (1, 2, 4))):
        stranger = named(other)
        assert stranger is not None
        assert stranger.group != found.group
    for unknown in ("17", "17-abc", "a.b.c.d", ""):
        assert named(unknown) is None


class Runner:
    """vLLM's table of running requests, as far as a proposer reads it: whose each row is, how long, and all tokens."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self.proposer = GroupProposer(
            SimpleNamespace(model_config=SimpleNamespace(max_model_len=64)), clock=lambda: 0.0
        )
        self.proposer.attach(self)

    @property
    def input_batch(self) -> Any:
        return SimpleNamespace(req_ids=list(self.rows))

    def step(self, **made: list[int]) -> dict[str, list[int]]:
        """Each row gets these tokens; the drafts that come back."""
        names = list(self.rows)
        of = {name.partition(".")[0]: name for name in names}
        for short, tokens in made.items():
            self.rows[of[short]] += tokens
        sampled = [made.get(name.partition(".")[0], []) for name in names]
        table = torch.zeros(len(names), 64, dtype=torch.int64)
        for row, name in enumerate(names):
            table[row, : len(self.rows[name])] = torch.tensor(self.rows[name])
        lengths = [len(self.rows[name]) for name in names]
        drafts = self.proposer.propose(sampled, lengths, table.numpy(), slot_mappings=None)
        return {name.partition(".")[0]: draft for name, draft in zip(names, drafts, strict=True)}


def test_a_sample_that_comes_from_another_engine_is_counted_once() -> None:
    """What it said there was heard as a sibling's; a draft's worth is guessed from how often a token followed."""
    seen = []
    for before in ((), (10, 11, 12)):
        runner, name = Runner(), request_name(0, key(0), PROMPT)
        if before:
            runner.proposer.hear([(group_name(key(0), PROMPT), PROMPT, 0, 0, before)], ())
        runner.rows[name] = [*PROMPT, 10, 11, 12]
        runner.step(**{"0": [13]})
        [group] = runner.proposer._speculator.groups._groups.values()
        seen.append(group.automaton.continued(ROOT))
    assert seen == [6, 6]


def test_a_proposer_drafts_from_siblings_and_counts_what_was_accepted() -> None:
    runner = Runner()
    for place, name in enumerate(("a", "b", "c")):
        request = request_name(0, key(place % 2, prompt=place // 2), (7, 8)).replace("0.", f"{name}.", 1)
        runner.rows[request] = [7, 8]
    assert runner.step(a=[1], b=[1], c=[1]) == {"a": [], "b": [], "c": []}
    drafts = runner.step(a=[2, 3, 4, 5], b=[2], c=[2])
    assert drafts["b"][:3] == [3, 4, 5]
    assert drafts["c"] == [], "another group's"
    drafts = runner.step(a=[9], b=[3, 4, 6], c=[])
    assert drafts["c"] == [], "it is still being prefilled"
    assert runner.proposer.total.accepted == 2
    assert runner.proposer.total.verifications == 1
    assert runner.proposer.total.drafted >= 3


def test_a_finished_or_preempted_request_is_followed_from_its_tokens() -> None:
    runner = Runner()
    first, second = (request_name(i, key(i), (7, 8)) for i in range(2))
    runner.rows = {first: [7, 8]}
    runner.step(**{"0": [1]})
    runner.step(**{"0": [2, 3, 4]})
    runner.rows = {second: [7, 8]}
    assert runner.step(**{"1": [1]})["1"][:3] == [2, 3, 4], "what it said stays for its siblings"
    back = request_name(2, key(0), (7, 8))
    runner.rows = {back: [7, 8, 1, 2]}  # a sample that moved: its accepted tokens are vLLM's prompt
    assert runner.step(**{"2": [3]})["2"][:1] == [4]


def test_a_proposer_drafts_from_what_siblings_said_on_other_engines() -> None:
    runner = Runner()
    name = group_name(key(0), (7, 8))
    runner.proposer.hear(
        [(name, (7, 8), 5, 0, (1, 2, 3)), (name, None, 5, 3, (4,)), ("?", None, 1, 0, (9,))], []
    )
    runner.rows = {request_name(0, key(0), (7, 8)): [7, 8]}
    assert runner.step(**{"0": [1]})["0"][:3] == [2, 3, 4]
    runner.proposer.hear([], [name])
    assert runner.step(**{"0": [2]})["0"][:2] == [3, 4], "a sample of the group is generated here"
    runner.rows = {}
    runner.step()
    runner.proposer.hear([], [name])
    runner.rows = {request_name(1, key(1), (7, 8)): [7, 8]}
    assert runner.step(**{"1": [1]})["1"] == []


def test_expanded_parameters_are_each_request_s_own() -> None:
    given = torch.tensor([0.0, 0.25, 0.9])
    output = torch.full((6,), math.nan)
    expand(output, given, torch.tensor([2, 2, 6]), 0.0, 1.0, 128)
    assert output.tolist() == [1.0, 1.0, *given[2:].repeat(4).tolist()]


def test_raw_logprobs_are_those_of_each_kept_token() -> None:
    """Two requests, two drafted tokens and none: logits lie request by request, and -1 stands where nothing was kept."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[4, 1, -1], [5, -1, -1]], dtype=torch.int32)
    columns = SimpleNamespace(
        logprobs=torch.zeros(6, 2), logprob_token_ids=torch.zeros(6, 2, dtype=torch.int32)
    )
    both = _with_raw_logprobs_of_drafts(
        lambda *_: SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=columns)
    )
    metadata = SimpleNamespace(cu_num_sampled_tokens=torch.tensor([3, 4], dtype=torch.int32))
    both(metadata, None, logits, SimpleNamespace(max_num_logprobs=1))
    exact = logits.log_softmax(-1)
    assert columns.logprobs[0, 1] == exact[0, 4]
    assert columns.logprobs[1, 1] == exact[1, 1]
    assert columns.logprobs[3, 1] == exact[3, 5]
    assert columns.logprob_token_ids[[0, 1, 3], 1].tolist() == [3, 0, 4], "an id that is not the token's"


def test_vllm_is_asked_for_it_only_where_it_was_seen_to_work(tmp_path: Any) -> None:
    text = models.config_text(head_dim=32)
    spec = replace(models.spec(text, dtype="float32", name="vllm"), speculation="group")
    _, _, config = setup.checked_config(spec)

    def of(spec: EngineSpec, gpus: int = 1) -> dict[str, Any]:
        return setup.arguments(spec, EngineHost("r", gpus=gpus), tmp_path, config, gpu=False)

    assert of(spec)["speculative_config"]["model"] == PATH
    assert "speculative_config" not in of(replace(spec, speculation="none"))
    with pytest.raises(EngineError, match="engines of one GPU"):
        of(spec, gpus=2)
    with pytest.raises(EngineError, match="both set"):
        of(replace(spec, options='{"speculative_config": {"method": "ngram"}}'))
    with pytest.raises(EngineError, match="does not tell which experts"):
        of(replace(spec, routing=4))


@kinds.VLLM_ONLY
def test_vllm_keeps_distributions_greedy_tokens_and_logprobs_with_siblings_drafts(kind: Any) -> None:
    """4,000 samples of one group, in waves: later ones are drafted from all that earlier ones said, and from what is said to come from
    siblings on other engines and does not. Chi-squared over whole completions.

    How much is drafted, and so what is drawn, depends on how long passes take: each run is another trial. With 2,000 samples and a level
    of .001 one trial in a thousand failed by chance. At 1e-6 one in a million does, and twice the samples show a bias as small.
    """
    stats = pytest.importorskip("scipy.stats")
    text = kind.text(vocab_size=VOCAB, num_hidden_layers=1)
    model = models.plain_model(text, seed=8, scale=2.0)
    cut = Sampling(24, 0.7, 0.9, 4)

    def ask(i: int, how: Sampling, tokens: int) -> Request:
        return Request(i, PROMPT, (), tokens, how, 5, SampleKey("train", 0, how.max_tokens, i))

    async def mislead(engine: Any, how: Sampling, *tokens: int) -> None:
        group = GroupName(SampleKey("train", 0, how.max_tokens, 0), PROMPT)
        wrong = tuple(SiblingSaid(group, COUNT + i, 0, tokens[i:] + tokens[:i]) for i in range(len(tokens)))
        await engine.hear(HearSiblings(wrong))
        await engine.hear(HearSiblings((SiblingSaid(group, 2 * COUNT, 0, (VOCAB, 1 << 30)),)))

    async def main() -> tuple[dict[int, Delta], dict[int, Delta], dict[int, Delta], Speculated]:
        spec = kind.spec(text, dtype="float32", max_batch=128, context=64)
        engine = await kind.start(replace(spec, speculation="group"))
        await engine.load(1, models.views(model))
        for how in (Sampling(24), Sampling(LENGTH)):
            await mislead(engine, how, *(range(VOCAB)))
        greedy = await finish(engine, *(ask(i, Sampling(24, 0.0), 24) for i in range(6)))
        truncated = await finish(engine, *(ask(10 + i, cut, 24) for i in range(8)))
        plain = await finish(engine, *(ask(100 + i, Sampling(LENGTH), LENGTH) for i in range(COUNT)))
        told = engine.speculated()  # as it was when one of the last samples ended
        await engine.close()
        return greedy, truncated, plain, told

    greedy, truncated, plain, total = kind.run(main())
    # How much is drafted depends on how long passes take here: enough of each that what follows says something.
    assert total.accepted > 100
    assert total.drafted - total.accepted > 50
    for one in greedy.values():
        logits = model(torch.tensor([PROMPT + one.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == one.token_ids
    for one in truncated.values():
        logits = model(torch.tensor([PROMPT + one.token_ids])).logits[0, len(PROMPT) - 1 : -1].double()
        for place, token in enumerate(one.token_ids):
            kept = (logits[place] / 0.7).topk(4)
            probs = torch.softmax(kept.values, -1)
            nucleus = kept.indices[probs.cumsum(-1) - probs < 0.9].tolist()
            assert token in nucleus
            used = torch.log_softmax(kept.values[: len(nucleus)], -1)[nucleus.index(token)]
            assert one.logprobs[place] == pytest.approx(float(used), abs=1e-4)
            raw = torch.log_softmax(logits[place], -1)[token]
            assert one.raw_logprobs[place] == pytest.approx(float(raw), abs=1e-4)
    texts = [
        tuple(int(d) for d in torch.unravel_index(torch.tensor(n), (VOCAB,) * LENGTH))
        for n in range(VOCAB**LENGTH)
    ]
    logits = model(torch.tensor([PROMPT + t for t in texts])).logits[:, 1:-1].double()
    logprobs = torch.log_softmax(logits, -1).gather(2, torch.tensor(texts)[:, :, None])[:, :, 0].sum(1)
    expected = {t: COUNT * math.exp(float(x)) for t, x in zip(texts, logprobs, strict=True)}
    found = Counter(one.token_ids for one in plain.values())
    rare = [t for t in texts if expected[t] < 5]
    often = [t for t in texts if expected[t] >= 5]
    assert len(often) > 20
    observed = [found[t] for t in often] + [sum(found[t] for t in rare)]
    wanted = [expected[t] for t in often] + [sum(expected[t] for t in rare)]
    assert stats.chisquare(observed, wanted).pvalue > 1e-6
    for one in list(plain.values())[:200]:
        exact = logprobs[texts.index(one.token_ids)]
        assert sum(one.logprobs) == pytest.approx(float(exact), abs=1e-4)
