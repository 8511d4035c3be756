"""A view is made of two answers, one after the other: no GPU is idle in it that a listed job holds, and none stays busy for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.cluster.model import Job, JobFlag, JobState, Node
from scavenger.cluster.slurm.backend import agree, settled

EMPTY: frozenset[tuple[int, int]] = frozenset()


def node(name: str = "n1", gpus: int = 0, cpus: int = 0) -> Node:
    return Node(name, frozenset({"mixed"}), frozenset({"p"}), "h100", 8, gpus, 64, cpus, 1000, 0)


def job(
    job_id: int,
    gpus: int,
    *nodes: str,
    state: JobState = JobState.RUNNING,
    flags: Sequence[JobFlag] = (),
    cpus: int = 1,
) -> Job:
    where = nodes or ("n1",)
    by_node = tuple((name, gpus // len(where)) for name in where) if gpus % len(where) == 0 else ()
    return Job(
        job_id, "alice", "p", state, frozenset(flags), nodes=where, gpus=gpus, gpus_by_node=by_node, cpus=cpus
    )


def allocated(
    nodes: Sequence[Node], jobs: Sequence[Job], before: Sequence[Job] = ()
) -> list[tuple[int, int]]:
    return [(one.gpus_allocated, one.cpus_allocated) for one in agree(nodes, jobs, settled(before))]


def test_a_job_that_started_between_the_two_answers_holds_its_gpus() -> None:
    old = job(1, 2, cpus=4)
    assert allocated([node(gpus=2, cpus=4)], [old, job(2, 3, cpus=6)], [old]) == [(5, 10)]
    assert allocated([node(gpus=5, cpus=10)], [old, job(2, 3, cpus=6)], [old]) == [(5, 10)], (
        "the nodes' answer had it"
    )
    assert allocated([node()], [job(2, 3, cpus=6)]) == [(3, 6)], "at the first look, too"


def test_a_job_that_completes_holds_its_gpus_until_it_is_gone() -> None:
    """Measured on 22.05: `GresUsed` is 0 from the first moment, and no other job starts before the last process is gone."""
    ending = job(1, 3, flags=[JobFlag.COMPLETING])
    assert allocated([node()], [ending], [job(1, 3)]) == [(3, 1)]
    assert allocated([node(gpus=3, cpus=1)], [ending], [job(1, 3)]) == [(3, 1)], "where Slurm counts it still"
    assert allocated([node()], [replace(ending, state=JobState.COMPLETED, flags=frozenset())]) == [(0, 0)]
    assert allocated([node()], [replace(ending, state=JobState.PENDING, flags=frozenset(), nodes=())]) == [
        (0, 0)
    ]


def test_a_job_that_came_back_between_two_looks_is_a_new_one() -> None:
    first = job(1, 3)
    assert allocated([node()], [replace(first, restart_count=1)], [first]) == [(3, 1)]


def test_a_job_that_ended_in_between_leaves_its_gpus_busy_and_makes_no_room_for_one_that_started_there() -> (
    None
):
    ended, old = job(1, 4), job(2, 2)
    assert allocated([node(gpus=6, cpus=2)], [old], [ended, old]) == [(6, 2)]
    assert allocated([node(gpus=6, cpus=2)], [old, job(3, 4)], [ended, old]) == [(6, 2)]


def test_a_job_whose_nodes_do_not_share_alike_is_taken_at_the_most_only_while_it_is_new() -> None:
    """Five GPUs over two nodes: four and one, as the nodes say from the next look on."""
    uneven = job(1, 5, "n1", "n2", cpus=4)
    nodes = [node("n1", 4, 2), node("n2", 1, 2)]
    assert allocated(nodes, [uneven]) == [(4, 2), (3, 2)]
    assert allocated(nodes, [uneven], [uneven]) == [(4, 2), (1, 2)]
    assert allocated([node("n1", 4, 2), node("n2", 1, 2)], [uneven, job(2, 2, "n2")], [uneven]) == [
        (4, 2),
        (3, 3),
    ]


SIZES = st.lists(st.integers(0, 4), max_size=4)


@settings(max_examples=300, deadline=None)
@given(SIZES, SIZES, SIZES, st.lists(st.booleans(), min_size=4, max_size=4))
def test_whatever_came_and_went_between_the_answers_no_gpu_that_a_listed_job_holds_is_idle(
    staying: list[int], leaving: list[int], coming: list[int], counted: list[bool]
) -> None:
    """At the first answer `staying` and `leaving` run, and those of `coming` that are `counted`; at the second one `leaving` is gone."""
    old = [job(n, gpus) for n, gpus in enumerate(staying)]
    gone = [job(100 + n, gpus) for n, gpus in enumerate(leaving)]
    new = [job(200 + n, gpus) for n, gpus in enumerate(coming)]
    first = (
        sum(staying) + sum(leaving) + sum(gpus for gpus, seen in zip(coming, counted, strict=False) if seen)
    )
    [(gpus, _)] = allocated([replace(node(gpus=first), gpus=64)], [*old, *new], [*old, *gone])
    assert gpus >= sum(staying) + sum(coming)
    assert gpus >= first, "what the nodes call busy is never called idle"
    if not gone:
        assert gpus == sum(staying) + sum(coming), "and no more is taken for busy than there is"
