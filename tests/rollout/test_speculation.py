"""Grouped speculation without an engine: the automaton against brute force, what is kept, and how long drafts are."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines.speculation import automaton as automata
from rollout.engines.speculation import groups as groups_module
from rollout.engines.speculation.automaton import ROOT, SuffixAutomaton
from rollout.engines.speculation.groups import MIN_CONTEXT, NO_DRAFT, DraftTokens, Groups
from rollout.engines.speculation.length import Acceptance, PassTime, draft_length
from rollout.engines.speculation.speculator import Speculator
from scavenger.protocol.messages import SampleKey

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=24), min_size=1, max_size=4)
#: (which sample, its next tokens) in the order in which they come.
TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=3)), max_size=16
)


def key(index: int, prompt: int = 0) -> SampleKey:
    return SampleKey("train", 1, prompt, index)


def enter(
    to: Groups | Speculator,
    handle: int,
    sample: SampleKey,
    prompt: tuple[int, ...],
    accepted: tuple[int, ...] = (),
) -> None:
    to.enter(handle, groups_module.group_of(sample, prompt), sample.index, prompt, accepted)


def grown(prompt: list[int], turns: list[tuple[int, list[int]]]) -> tuple[Groups, dict[int, list[int]]]:
    groups = Groups()
    texts: dict[int, list[int]] = {}
    for index in range(4):
        enter(groups, index, key(index), tuple(prompt))
        texts[index] = []
    for index, tokens in turns:
        groups.extend(index, tokens)
        texts[index] += tokens
    return groups, texts


def occurrences(context: list[int], prompt: list[int], texts: dict[int, list[int]]) -> Counter[int]:
    """What follows a context, and how often: places of the prompt count once, whoever has it."""
    found: Counter[int] = Counter()
    for owner, text in enumerate([[], *texts.values()]):
        whole = prompt + text
        for end in range(len(context), len(whole)):
            own = owner > 0 and end >= len(prompt)
            if (own or (owner == 0)) and whole[end - len(context) : end] == context:
                found[whole[end]] += 1
    return found


def brute_force(prompt: list[int], texts: dict[int, list[int]], index: int, most: int) -> list[int]:
    """The same draft as a group makes, by looking at every place."""
    text = prompt + texts[index]
    context = next(
        (text[start:] for start in range(len(text)) if occurrences(text[start:], prompt, texts)), []
    )
    drafted: list[int] = []
    while len(drafted) < most and len(context) >= MIN_CONTEXT:
        followed = occurrences(context, prompt, texts)
        if not followed:
            context = context[1:]
            continue
        token = max(followed.items(), key=lambda one: (one[1], -one[0]))[0]
        drafted.append(token)
        context = [*context, token]
    return drafted


@given(SEQUENCES)
@settings(max_examples=100, deadline=None)
def test_the_automaton_knows_every_context_and_how_often_it_ends(sequences: list[list[int]]) -> None:
    automaton = SuffixAutomaton()
    at = [ROOT] * len(sequences)
    # They grow side by side, as siblings do.
    for place in range(max(map(len, sequences))):
        for one, text in enumerate(sequences):
            if place < len(text):
                at[one] = automaton.extend(at[one], text[place : place + 1])
    assert len(automaton) <= 2 * sum(map(len, sequences)) + 1
    contexts = {tuple(t[a:b]) for t in sequences for a in range(len(t)) for b in range(a + 1, len(t) + 1)}
    for context in contexts:
        state = ROOT
        for token in context:
            state = dict(automaton.successors(state))[token]
        ends = sum(
            tuple(t[b - len(context) : b]) == context
            for t in sequences
            for b in range(len(context), len(t) + 1)
        )
        assert automaton.count(state) == ends
        assert automaton.length(state) >= len(context)


@given(SEQUENCES)
@settings(max_examples=50, deadline=None)
def test_a_sequence_is_the_longest_context_of_its_state(sequences: list[list[int]]) -> None:
    automaton = SuffixAutomaton()
    at = [automaton.extend(ROOT, text) for text in sequences]
    assert [automaton.length(state) for state in at] == [len(text) for text in sequences]


@given(st.lists(st.integers(0, 2), max_size=5), TURNS, st.integers(0, 3), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_a_draft_is_the_most_frequent_continuation_of_the_longest_context(
    prompt: list[int], turns: list[tuple[int, list[int]]], index: int, most: int
) -> None:
    groups, texts = grown(prompt, turns)
    drafted = groups.draft(index, most)
    assert list(drafted.tokens) == brute_force(prompt, texts, index, most)
    assert all(0 < one < 1 for one in drafted.frequency)
    assert len(drafted.frequency) == len(drafted.tokens)


def test_a_sibling_that_was_ahead_says_what_follows() -> None:
    groups = Groups()
    for index in range(2):
        enter(groups, index, key(index), (7, 8))
    groups.extend(0, [1, 2, 3, 4, 5])
    assert groups.draft(1, 3).tokens == (1, 2, 3), "from its first token on"
    groups.extend(1, [1, 2])
    assert groups.draft(1, 8).tokens[:3] == (3, 4, 5)
    assert groups.draft(0, 8) == NO_DRAFT, "nobody is ahead of the first"


def test_another_groups_tokens_are_no_draft() -> None:
    groups = Groups()
    enter(groups, 0, key(0, prompt=0), (7, 8))
    groups.extend(0, [1, 2, 3, 4, 5])
    enter(groups, 1, key(1, prompt=1), (7, 8))
    enter(groups, 2, key(2, prompt=0), (7, 8, 9))
    enter(groups, 3, SampleKey("eval", 1, 0, 0), (7, 8))
    for stranger in (1, 2, 3):
        groups.extend(stranger, [1, 2])
        assert groups.draft(stranger, 4) == NO_DRAFT


def test_what_a_sample_said_on_another_engine_is_counted_once() -> None:
    groups = Groups()
    enter(groups, 0, key(0), (7, 8))
    groups.extend(0, [1, 2, 3])
    groups.leave(0)
    for back in (1, 2, 3):
        enter(groups, back, key(0), (7, 8), (1, 2, 3))
        groups.leave(back)
    enter(groups, 4, key(1), (7, 8))
    groups.extend(4, [1, 2, 9])
    enter(groups, 5, key(2), (7, 8))
    groups.extend(5, [1, 2, 9])
    enter(groups, 6, key(3), (7, 8))
    groups.extend(6, [1, 2])
    assert groups.draft(6, 1).tokens == (9,), "two samples said 9, one said 3, however often that one moved"


def test_memory_is_bounded_and_idle_groups_go_first() -> None:
    groups = Groups(max_tokens=100)
    enter(groups, 0, key(0, prompt=0), (1,) * 10)
    for prompt in range(1, 20):
        enter(groups, prompt, key(0, prompt=prompt), (prompt,) * 10)
        groups.extend(prompt, [5, 6, 7] * 5)
        groups.leave(prompt)
        assert groups.tokens <= 100
    groups.extend(0, [2, 3, 4] * 10)
    assert groups.draft(0, 3).tokens == (2, 3, 4), "the one that is generated was kept"
    enter(groups, 50, key(1, prompt=0), (1,) * 10)
    for _ in range(40):
        groups.extend(0, [2, 3, 4])
        groups.extend(50, [2, 3, 4])
        assert groups.tokens <= 100
    assert groups.draft(50, 3).tokens == (2, 3, 4), "and began anew, alone as it was"


def test_a_long_repetition_costs_as_much_a_token_as_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of one token has as many contexts at each place as it is long: only so many of them are counted."""
    steps = 0
    monkeypatch.setattr(automata, "COUNTED", 16)
    plain = SuffixAutomaton._add

    def counted(self: SuffixAutomaton, state: int) -> None:
        nonlocal steps
        before = sum(self._count)
        plain(self, state)
        steps += sum(self._count) - before

    monkeypatch.setattr(SuffixAutomaton, "_add", counted)
    groups = Groups()
    enter(groups, 0, key(0), (7, 8))
    groups.extend(0, [1] * 500)
    assert steps <= 16 * 502
    assert groups.draft(0, 4).tokens == (1, 1, 1, 1)


# ---------------------------------------------------------------- how long


def timed(fixed: float, each: float, floor_s: float = 0.0) -> PassTime:
    time = PassTime(floor_s)
    for positions in (*range(1, 65), *range(64, 0, -1)) * 4:
        time.measured(positions, fixed + each * positions)
    return time


def test_pass_times_are_learned_as_a_line() -> None:
    time = timed(0.010, 0.0002)
    for positions in (1, 16, 64, 128):
        assert time.of(positions) == pytest.approx(0.010 + 0.0002 * positions, rel=0.02)


def test_a_machine_that_did_something_else_teaches_little() -> None:
    time = timed(0.010, 0.0002)
    time.measured(8, 30.0)
    assert time.of(8) == pytest.approx(0.0116, rel=0.05)


def test_sure_drafts_are_as_long_as_they_go_where_compute_is_free() -> None:
    found = draft_length([[0.95] * 16], 1, timed(0.020, 0.00001))
    assert found.length == 16
    assert found.expected == pytest.approx(1 + sum(0.95**i for i in range(1, 17)))
    assert "16 drafted tokens make" in found.reason


def test_a_full_batch_without_free_compute_drafts_nothing() -> None:
    found = draft_length([[0.9] * 16] * 64, 64, timed(0.0001, 0.001))
    assert found.length == 0
    assert found.reason == "16 drafted tokens would cost more than they give"


def test_poor_drafts_are_not_verified() -> None:
    time = timed(0.010, 0.001)
    assert draft_length([[0.05] * 16], 4, time).length == 0
    assert draft_length([[0.9] * 16] * 4, 4, time).length > 0


def test_the_emptier_the_batch_the_deeper_it_drafts() -> None:
    time = timed(0.010, 0.0005)
    lengths = [draft_length([[0.85] * 16] * rows, rows, time).length for rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_a_row_without_a_draft_pays_for_padding_alone() -> None:
    time = timed(0.020, 0.001)
    chances = [[0.9] * 8] * 2
    assert draft_length(chances, 16, time).length == 0
    assert draft_length(chances, 16, time, padded=False).length > 0


def test_nothing_to_draft_has_its_reason() -> None:
    assert draft_length([], 3, PassTime()).reason == "no sibling said what follows"


def test_time_that_passes_anyway_is_free() -> None:
    assert draft_length([[0.3] * 8] * 8, 8, timed(0.001, 0.001)).length == 0
    assert draft_length([[0.3] * 8] * 8, 8, timed(0.001, 0.001, floor_s=1.0)).length == 8


def test_acceptance_is_measured_and_forgotten_again() -> None:
    acceptance = Acceptance()
    assert acceptance.chance(0.8) == pytest.approx(0.8)
    for _ in range(200):
        acceptance.judged((0.8, 0.8), 0)
    low = acceptance.chance(0.8)
    assert low < 0.05
    assert acceptance.chance(0.3) == pytest.approx(0.3), "of another prediction nothing was measured"
    for _ in range(8000):
        acceptance.age()
    assert acceptance.chance(0.8) > 0.7, "so that what failed is tried again"


def test_tokens_behind_the_first_refused_one_say_nothing() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.judged((0.9, 0.3, 0.6), 1)
    assert acceptance.chance(0.9) > 0.95
    assert acceptance.chance(0.3) < 0.1
    assert acceptance.chance(0.6) == pytest.approx(0.6)


def test_a_speculator_stops_drafting_what_is_never_accepted() -> None:
    speculator = Speculator()
    for index in range(2):
        enter(speculator, index, key(index), (7, 8))
    speculator.extend(0, [1, 2, 3] * 200)
    speculator.extend(1, [1, 2, 3])
    offered = []
    for _ in range(100):
        proposal = speculator.propose({1: 16})
        offered.append(proposal.decision.length)
        for draft in proposal.drafts.values():
            speculator.verified(draft, 0)
        speculator.passed(2 * (1 + proposal.decision.length), 0.010 + 0.001 * (1 + proposal.decision.length))
    assert offered[0] > 0
    assert offered[-1] == 0
    total = speculator.total
    assert total.accepted == 0
    assert total.drafted == sum(offered)
    assert total.verifications == sum(map(bool, offered))


def test_where_drafts_do_not_pay_they_are_made_ever_less_often_until_the_batch_empties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft costs time of its own, which no pass shows."""
    speculator = Speculator()
    for index in range(64):
        enter(speculator, index, key(index), (7, 8))
        speculator.extend(index, [1, 2, 3] if index else [1, 2, 3] * 40)
    for rows in (1, 16, 64) * 20:
        speculator.passed(rows, 0.001 * rows)
    asked: list[int] = []
    plain = Groups.draft
    passes = 0

    def noted(self: Groups, handle: int, most: int) -> DraftTokens:
        asked.append(passes)
        return plain(self, handle, most)

    monkeypatch.setattr(Groups, "draft", noted)
    while passes < 200:
        proposal = speculator.propose(dict.fromkeys(range(64), 16))
        assert not proposal.drafts
        assert "more" in proposal.decision.reason or "cost" in proposal.decision.reason
        passes += 1
    tried = sorted(set(asked))
    assert tried[:5] == [0, 2, 5, 10, 19]
    assert len(tried) < 13
    speculator.propose(dict.fromkeys(range(30), 16))
    assert asked[-1] == 200, "fewer than half are left: drafts may pay now"


def test_drafts_grow_as_they_pay() -> None:
    """One that is never verified in its length is not made in it."""
    speculator = Speculator()
    for index in range(2):
        enter(speculator, index, key(index), (7, 8))
    speculator.extend(0, list(range(10, 60)))
    lengths = []
    for _ in range(3):
        (draft,) = speculator.propose({1: 48}).drafts.values()
        lengths.append(len(draft.tokens))
        speculator.verified(draft, len(draft.tokens))
        speculator.extend(1, [10 + i + sum(lengths[:-1]) for i in range(len(draft.tokens))])
    assert lengths[0] == 4
    assert lengths[0] < lengths[1] < lengths[2]
    assert all(after <= 2 * before for before, after in itertools.pairwise(lengths))


def test_no_draft_is_longer_than_the_sample_may_grow() -> None:
    speculator = Speculator()
    for index in range(2):
        enter(speculator, index, key(index), (7, 8))
    speculator.extend(0, list(range(1, 12)))
    assert [len(d.tokens) for d in speculator.propose({1: 2}).drafts.values()] == [2]
    assert not speculator.propose({1: 0}).drafts
