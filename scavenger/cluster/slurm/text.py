"""Pure: the words and numbers that Slurm writes wherever it writes them: states, durations, GRES and TRES texts.

Shared by every way of asking Slurm (`commands`, `json_output`, `pyslurm.rows`). A word that is not known raises
`ClusterUnavailable`. Who reads the record decides whether that makes a field unknown or fails the whole poll.

Host lists too: 'gpu[01-03,7],login1' -> names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from scavenger.cluster.model import KNOWN_NODE_STATES, JobFlag, JobState, PreemptMode, Unread
from scavenger.errors import ClusterUnavailable
from scavenger.parsing import whole

INFINITE_S = float("inf")

# What a flag means when `squeue` shows it in the state's place. A COMPLETING job still holds its node.
_FLAG_BASE: Mapping[JobFlag, JobState] = {
    JobFlag.COMPLETING: JobState.RUNNING,
    JobFlag.CONFIGURING: JobState.RUNNING,
    JobFlag.RESIZING: JobState.RUNNING,
    JobFlag.SIGNALING: JobState.RUNNING,
    JobFlag.STAGE_OUT: JobState.RUNNING,
    JobFlag.STOPPED: JobState.SUSPENDED,
    JobFlag.REQUEUED: JobState.PENDING,
    JobFlag.REQUEUE_HOLD: JobState.PENDING,
    JobFlag.REQUEUE_FED: JobState.PENDING,
    JobFlag.SPECIAL_EXIT: JobState.PENDING,
    JobFlag.REVOKED: JobState.CANCELLED,
    JobFlag.RESV_DEL_HOLD: JobState.PENDING,
    JobFlag.LAUNCH_FAILED: JobState.PENDING,
    JobFlag.RECONFIG_FAIL: JobState.PENDING,
    JobFlag.POWER_UP_NODE: JobState.RUNNING,  # as CONFIGURING: it has its nodes, which boot
    JobFlag.EXPEDITING: JobState.PENDING,  # put back, to start before all others
}
_STATES = {state.value: state for state in JobState}
_FLAGS = {flag.value: flag for flag in JobFlag}
NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE", "NOT_SET", "Unknown", "INVALID"})
_MAX_TASKS = 1_000_000
#: Texts of a kind that are read once and then known: a queue of 10,000 jobs has few states, shapes and limits, at each poll the same.
REMEMBERED = 4096
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE"})


# ---- states -------------------------------------------------------------------------------------------------------


@lru_cache(REMEMBERED)
def parse_state(text: str) -> tuple[JobState, frozenset[JobFlag]]:
    """A state as `squeue` prints it: a base state, or a flag in its place, or both ('RUNNING,COMPLETING')."""
    base: JobState | None = None
    flags = set()
    for word in re.split(r"[,+]", text.strip()):
        if word in _STATES:
            base = _STATES[word]
        elif word in _FLAGS:
            flags.add(_FLAGS[word])
        else:
            raise ClusterUnavailable(
                f"unknown job state {text!r}", "this Slurm version may be too new; report it"
            )
    if base is None:
        base = _FLAG_BASE[min(flags, key=lambda flag: flag is not JobFlag.COMPLETING)]
    return base, frozenset(flags)


_NODE_MARKS = {
    "*": "not_responding",
    "~": "powered_down",
    "#": "powering_up",
    "!": "power_down",
    "%": "powering_down",
    "$": "maint",
    "@": "reboot",
    "^": "reboot",
    "-": "planned",
}


@lru_cache(REMEMBERED)
def parse_node_states(text: str) -> frozenset[str]:
    """'IDLE+DRAIN', 'DOWN*', 'MIXED+NOT_RESPONDING' as lower-case words, the trailing marks spelled out."""
    words = set()
    for word in text.split("+"):
        bare = word.rstrip("".join(_NODE_MARKS))
        words |= {_NODE_MARKS[mark] for mark in word[len(bare) :]}
        if not re.fullmatch(r"[A-Z_]+", bare):
            raise ClusterUnavailable(f"unknown node state {text!r}")
        words.add(bare.lower())
    return frozenset(words)


def node_states(field: str, text: str) -> tuple[frozenset[str], tuple[Unread, ...]]:
    """`parse_node_states`, and what of it is not known: with a word that this code does not know no node is usable."""
    try:
        states = parse_node_states(text)
    except ClusterUnavailable:
        return frozenset({"unknown"}), (Unread(field, text),)
    return states, () if states <= KNOWN_NODE_STATES else (Unread(field, text),)


def parse_preempt_mode(text: str) -> PreemptMode:
    words = set(text.split(",")) - {"GANG", "WITHIN"}
    if not words:
        return PreemptMode.OFF
    if len(words) > 1 or not words <= set(PreemptMode):
        raise ClusterUnavailable(f"unknown PreemptMode {text!r}")
    return PreemptMode(words.pop())


# ---- resources ----------------------------------------------------------------------------------------------------


class RequestedTres(NamedTuple):
    """A job's resources in Slurm's words; each may be empty or 'N/A'."""

    allocated: str
    per_job: str
    per_node: str
    per_task: str
    per_socket: str


@lru_cache(REMEMBERED)
def job_gpus(asked: RequestedTres, n_nodes: int, n_tasks: int) -> int:
    """GPUs over all nodes. The allocation says it only where the site tracks gres/gpu; else what was asked for does.

    A job that asks for shares of a GPU (gres/shard, gres/mps) counts as one on each node, however many share it.
    """
    allocated = _tracked_gpus(asked.allocated)
    if allocated is not None:
        return allocated
    for text, times in (
        (asked.per_job, 1),
        (asked.per_node, n_nodes),
        (asked.per_task, n_tasks),
        (asked.per_socket, n_nodes),
    ):
        if text not in NOTHING:
            if not re.search(r"[:/=]", text):  # 'gres:gpu', 'gres/gpu:2'; a word alone is none of Slurm's
                raise ClusterUnavailable(f"not a job's GRES: {text[:80]!r}")
            return (count_gpus(text) or int(_asks_for_a_share(text))) * times
    return 0


def spread(gpus: int, nodes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """GPUs by node where the text determines them: on one node, or the same number on each."""
    even = bool(nodes) and gpus > 0 and gpus % len(nodes) == 0
    return tuple((node, gpus // len(nodes)) for node in nodes) if even else ()


def text_or_empty(text: str) -> str:
    return "" if text in NOTHING else text


# ---- numbers --------------------------------------------------------------------------------------------------------


@lru_cache(REMEMBERED)
def parse_duration(text: str) -> float:
    """Seconds from 'M', 'M:S', 'H:M:S', 'D-H', 'D-H:M', 'D-H:M:S'; infinite when unlimited, 0 when not set."""
    if text in _UNLIMITED:
        return INFINITE_S
    if text in NOTHING or text == "Partition_Limit":
        return 0.0
    match = re.fullmatch(r"(?:([0-9]{1,18})-)?([0-9]{1,18})(?::([0-9]{1,18}))?(?::([0-9]{1,18}))?", text)
    if match is None:
        raise ClusterUnavailable(f"not a duration: {text[:80]!r}")
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    if match[1] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return float(int(match[1]) * 86400 + hours * 3600 + minutes * 60 + seconds)
    hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return float(hours * 3600 + minutes * 60 + seconds)


def parse_tres(text: str) -> dict[str, int]:
    """'cpu=4,node=1,gres/gpu=2' as counts; typed entries ('gres/gpu:h100=2') and memory are left out."""
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {key: count for key, _, value in pairs if ":" not in key and (count := whole(value)) is not None}


def _tracked_gpus(tres: str) -> int | None:
    """GPUs in a TRES text; None where the site does not track them. Raises `ClusterUnavailable` for no number."""
    counts = parse_tres(tres)
    if "gres/gpu" not in counts and re.search(r"(?:^|,)gres/gpu(?:=|,|$)", tres):
        raise ClusterUnavailable(f"not a number of GPUs: {tres[:80]!r}")
    return counts.get("gres/gpu")


#: TRES of shares of a GPU.
_SHARES = ("gres/shard", "gres/mps")


class NodeGpus(NamedTuple):
    """A node's GPUs. What cannot be read is never idle: such a total is 0, and of such a use all of them are used."""

    kind: str
    total: int
    used: int
    unread: tuple[Unread, ...]


@lru_cache(REMEMBERED)
def node_gpus(gres: str, used: str | None, tracked: str, allocated: str) -> NodeGpus:
    """From a node's Gres, GresUsed, CfgTRES and AllocTRES. `used` is None or "" where it is not printed.

    Then TRES say it where the site tracks gres/gpu. In GresUsed every known release prints a count for each kind of
    GPU of the node. One without a count, or without any GPU, cannot be read. A GPU of which any share is in use counts
    as used, though Slurm does not count it: no job gets it whole.
    """
    try:
        kind, count = gpu_type(gres), count_gpus(gres)
    except ClusterUnavailable:
        return NodeGpus("", 0, 0, (Unread("Gres", gres),))
    if not count:
        return NodeGpus(kind, 0, 0, ())
    try:
        if used:
            counts = [here for _, here in _gpu_items(used, counted=True)]
            if counts:
                return NodeGpus(kind, count, sum(counts) + _shared_gpus(used), ())
        elif "gres/gpu" in (sizes := parse_tres(tracked)):
            uses = parse_tres(allocated)
            shared = max(
                (-(-uses.get(name, 0) * count // sizes[name]) for name in _SHARES if sizes.get(name)),
                default=0,
            )
            return NodeGpus(kind, count, min(count, (_tracked_gpus(allocated) or 0) + shared), ())
    except ClusterUnavailable:
        pass  # the return says so
    return NodeGpus(kind, count, count, (Unread("GresUsed", used or ""),))


@lru_cache(REMEMBERED)
def count_gpus(text: str) -> int:
    """GPUs in a Gres text: 'gpu:h100:4(S:0-1)', 'gres:gpu:2', 'gres/gpu:h100=1', 'gpu', or several with commas.

    Raises `ClusterUnavailable` where an item is none of Slurm's, so that a GPU in it might be missed.
    """
    return sum(count for _, count in _gpu_items(text))


@lru_cache(REMEMBERED)
def gpu_type(text: str) -> str:
    """The first GPU's type in a Gres text, or ''."""
    return next((kind for kind, _ in _gpu_items(text)), "")


# Details follow in brackets, one pair or more: '(S:0-1)', '(IDX:0,2-3)'. A comma in them joins no items.
_DETAILS = r"(?:\([^()]*\))*"
_ITEMS = re.compile(r",(?![^()]*\))")
# a type may begin with a digit, or be a number (2080ti, 3090, 1g.10gb); a number alone is a count
_GPU_ITEM = re.compile(
    rf"(?:gres[:/])?gpu(?:[:/](?![0-9]+(?:\(|$))([A-Za-z0-9_.-]+))?(?:[:=]([0-9]+))?{_DETAILS}"
)
_OTHER_ITEM = re.compile(
    rf"(?:gres:|[a-z]+/)?(?!gpu(?![\w-]))[A-Za-z_][\w-]*(?::[A-Za-z0-9_.-]+)*(?:=[A-Za-z0-9_.-]+)?{_DETAILS}",
    re.ASCII,
)


def _gpu_items(text: str, *, counted: bool = False) -> Iterable[tuple[str, int]]:
    """(type, count) of the items that are GPUs. `counted`: an item without a count is none of Slurm's."""
    if text in NOTHING:
        return
    for item in map(str.strip, _ITEMS.split(text)):
        match = _GPU_ITEM.fullmatch(item)
        if match is not None:
            count = whole(match[2]) if match[2] is not None else None if counted else 1
            if count is None:
                raise ClusterUnavailable(f"not a number of GPUs: {item[:80]!r}")
            yield match[1] or "", count
        elif not _OTHER_ITEM.fullmatch(item):
            raise ClusterUnavailable(f"not a GRES: {item[:80]!r}")


# 'shard:h100:3(IDX:0-1)', 'mps:0(IDX:N/A)'; or with what is used of each GPU's shares: 'shard:3(1/4,2/4)'
_SHARE_ITEM = re.compile(
    r"(?:gres[:/])?(?:shard|mps)(?:[:/](?![0-9]+(?:\(|$))[A-Za-z0-9_.-]+)?[:=]([0-9]+)(?:\(([^()]*)\))?.*"
)


def _asks_for_a_share(text: str) -> bool:
    matches = (_SHARE_ITEM.fullmatch(item.strip()) for item in _ITEMS.split(text))
    return any(match is not None and whole(match[1]) != 0 for match in matches)


def _shared_gpus(used: str) -> int:
    """GPUs of a node's GresUsed of which some share is in use. Raises `ClusterUnavailable` where it does not say which."""
    gpus = set[int]()
    for item in _ITEMS.split(used):
        match = _SHARE_ITEM.fullmatch(item.strip())
        if match is None or whole(match[1]) == 0:
            continue
        detail = match[2] or ""
        if detail.startswith("IDX:"):
            gpus |= {
                int(number) for part in detail.removeprefix("IDX:").split(",") for number in _numbers(part)
            }
        elif re.fullmatch(r"[0-9]+/[0-9]+(?:,[0-9]+/[0-9]+)*", detail):
            gpus |= {n for n, share in enumerate(detail.split(",")) if not share.startswith("0/")}
        else:
            raise ClusterUnavailable(f"not which GPUs are shared: {item[:80]!r}")
    return len(gpus)


def count_tasks(text: str) -> int:
    """Tasks in an array's '0-9:2,20%4'; 1 for a job that is no array. Raises `ClusterUnavailable` when it is cut off or malformed."""
    if not text:
        return 1
    count = 0
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18})(?::([0-9]{1,18}))?)?", part)
        if match is None:
            raise ClusterUnavailable(f"malformed array tasks {text[:80]!r}")
        low, high, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if high < low or step < 1:
            raise ClusterUnavailable(f"malformed array tasks {text[:80]!r}")
        count += (high - low) // step + 1
    if count > _MAX_TASKS:
        raise ClusterUnavailable(f"an array of {count} tasks: {text[:80]!r}")
    return count


_LIMIT = 100_000
#: A name's characters (DNS has 255), and its ranges in brackets: Slurm's own programs write two.
_LONGEST, _RANGES = 255, 8
#: What stands outside brackets. Anything else is in no node's name: the answer is damaged, or of an unknown release.
_NAME = re.compile(r"[A-Za-z0-9_.-]*", re.ASCII)


@lru_cache(256)
def planned(text: str) -> tuple[str, ...]:
    """`expand`, remembered: all waiting tasks of an array show the same nodes, and most plans are those of the poll before."""
    return tuple(expand(text))


def expand(text: str) -> list[str]:
    """Names in the order written, zero padding kept. Raises `ClusterUnavailable` on a malformed or absurdly long list."""
    names: list[str] = []
    for item in _split(text):
        names += _expand_item(item)
        if len(names) > _LIMIT:
            raise _too_long(text)
    return names


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(items) != text:
        raise ClusterUnavailable(f"malformed host list {text[:80]!r}")
    return items


def _expand_item(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if len(item if match is None else item[: match.start()]) > _LONGEST or item.count("[") > _RANGES:
        raise ClusterUnavailable(f"malformed host list {item[:80]!r}")
    if not _NAME.fullmatch(item if match is None else item[: match.start()]):
        raise ClusterUnavailable(f"a host's name cannot be {item[:80]!r}")
    if match is None:
        return [item]
    # the tails are within the limit, and so is each part: what is held before the product is checked is small
    head, tails, numbers = item[: match.start()], _expand_item(item[match.end() :]), list[str]()
    for part in match[1].split(","):
        numbers += _numbers(part)
        if len(numbers) * len(tails) > _LIMIT:
            raise _too_long(item)
    return [f"{head}{number}{tail}" for number in numbers for tail in tails]


def _numbers(part: str) -> list[str]:
    first, dash, last = part.partition("-")
    low, high = whole(first), whole(last if dash else first)
    if low is None or high is None or high < low or high - low > _LIMIT:
        raise ClusterUnavailable(f"malformed host range {part[:40]!r}")
    return [str(number).zfill(len(first)) for number in range(low, high + 1)]


def _too_long(text: str) -> ClusterUnavailable:
    return ClusterUnavailable(f"a host list of more than {_LIMIT:,} names: {text[:80]!r}")
