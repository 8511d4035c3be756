"""A finished run, the same each time, whose pages are pictures in the documentation.

40 steps; of three harvested engines two leave.

Made up: no model generated its completions. What is drawn of it is the product's.
"""

from __future__ import annotations

import json
import math
import struct
from hashlib import sha256
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from scavenger import config
from scavenger.ledger import records as r
from scavenger.protocol.messages import pack_logprobs, pack_tokens
from tests.ledger.examples import CONFIG, T0
from tests.top import sites

STEPS, GROUPS, SAMPLES, STEP_S = 40, 6, 8, 60.0
#: Token ids: digits, the end of a prompt, the end of a completion.
ASKS, ENDS = 10, 11
TOKENIZER = "model/tokenizer.json"
#: Engine, kind, node, when it came and left within the last step; the last ones are reserved.
ENGINES = (
    (1, "harvested", "gpu07", 2.0, 21.0),
    (2, "harvested", "gpu12", 2.0, None),
    (3, "harvested", "gpu19", 9.0, 33.0),
    (4, "reserved", "gpu01", 0.0, None),
)


def chance(*of: object) -> float:
    """In [0, 1), of its arguments alone."""
    return int.from_bytes(sha256(repr(of).encode()).digest()[:6], "big") / 2**48


def tokenizer(folder: Path) -> None:
    words = {**{str(i): i for i in range(10)}, ">": ASKS, "<eos>": ENDS}
    made = Tokenizer(WordLevel(words, unk_token="<eos>"))
    made.decoder = decoders.Fuse()
    (folder / TOKENIZER).parent.mkdir()
    made.save(str(folder / TOKENIZER))


def _reward(step: int) -> float:
    return 0.12 + 0.78 / (1 + math.exp(-(step - 16) / 5)) + 0.05 * (chance("reward", step) - 0.5)


def _metrics(step: int) -> str:
    slow = 9.0 * chance("wait", step) + (14.0 if step in (11, 12, 26) else 0.0)
    parts = {
        "seed": 6.0,
        "train": 21.0,
        "wait": slow,
        "reward": 1.4,
        "update": 1.1,
        "publish": 0.9,
        "checkpoint": 0.6,
    }
    seconds = {f"seconds_{name}": value for name, value in parts.items()} | {"seconds_to_training": 1.8}
    rest = {
        "reward": _reward(step),
        "reward_std": 0.4 - step / 200,
        "seconds": 29.5 + slow,
        "tokens": 3000.0 + 9 * step,
    }
    return json.dumps(seconds | rest | {"staleness_mean": 0.0, "length_mean": 6.1 + step / 60})


def ledger(folder: Path) -> str:
    """Its URL. The run's tokenizer is named as it lies below `folder`, the working directory: a picture has no test's path."""
    tokenizer(folder)
    begin = T0 + (STEPS - 1) * STEP_S
    first = [
        r.RunCreated(1, "sorting", "ada", 17, CONFIG, '{"name": "vllm"}', TOKENIZER, T0),
        r.AttemptGranted(1, 1, "gpu01", 100, 0, CONFIG, '{"name": "vllm"}', T0),
        r.VersionPublished(1, 1, 0, 1, b"root1", b"manifest1", 4096, T0),
        *(
            r.WorkerJoined(
                n,
                1,
                kind,
                f"i{n}" if kind == "harvested" else "",
                f"s{n}",
                0,
                500 + n,
                node,
                1,
                "vllm",
                begin + came,
            )
            for n, kind, node, came, _ in ENGINES
        ),
    ]
    steps: list[r.Record] = [
        r.StepCommitted(1, step, "train", 1, step, _metrics(step), T0 + step * STEP_S)
        for step in range(1, STEPS)
    ]
    last: list[r.Record] = []
    for group in range(GROUPS):
        last += _group(group, begin)
    gone = [
        r.WorkerLeft(n, "goodbye: preempted", True, 6, 19 + n, 0, begin + left)
        for n, _, _, _, left in ENGINES
        if left is not None
    ]
    done = [
        *gone,
        r.StepCommitted(1, STEPS, "train", 1, STEPS, _metrics(STEPS), begin + 45.0),
        *(r.WorkerLeft(n, "goodbye", True, 0, 0, 0, begin + 50.0) for n, *_, left in ENGINES if left is None),
        r.RunEnded(1, "finished", "40 steps", begin + 50.0),
    ]
    submissions: list[list[r.Record]] = [list(first), steps, last, list(done)]
    return config.read_daemon(sites.site(folder, submissions)).ledger_url


def _group(group: int, begin: float) -> list[r.Record]:
    """Every third sample begins on an engine that leaves, and is finished by another."""
    digits = [int(10 * chance("digit", group, i)) for i in range(6)]
    number, start = 10 * (group + 1), 100 * (group + 1)
    made: list[r.Record] = [
        r.GroupCreated(
            number,
            1,
            "train",
            STEPS,
            group,
            0,
            STEPS,
            pack_tokens([*digits, ASKS]),
            SAMPLES,
            start,
            '{"max_tokens": 8}',
            "{}",
            begin,
        )
    ]
    rewards, differences = [], list[r.Record]()
    for i in range(SAMPLES):
        sample = start + i
        said = sorted(digits)
        for place in range(6):  # of some samples a digit or two are wrong
            if chance("wrong", group, i, place) < 0.12:
                said[place] = (said[place] + 3) % 10
        said.append(ENDS)
        rewards.append(sum(a == b for a, b in zip(said, sorted(digits), strict=False)) / 6)
        logprobs = [-3.2 * chance("p", group, i, place) ** 5 for place in range(7)]
        from_, cut = (1, 3) if i % 3 == 0 else (2 + i % 3, 7)
        granted = begin + 10.0 + 1.5 * (i % 4) + group
        left = begin + 21.0 if cut == 3 else granted + 14.0 + 4.0 * chance("s", group, i)
        made += [
            r.LeaseGranted(sample, 1, from_, STEPS, 0, granted),
            _chunk(sample, 1, 0, said[:cut], logprobs[:cut], from_, left),
        ]
        made.append(r.LeaseEnded(sample, 1, "worker left" if cut == 3 else "finished", cut, 0, left))
        if cut == 3:
            again, over = left + 0.4, left + 9.0 + 3.0 * chance("s", group, i)
            made += [
                r.LeaseGranted(sample, 2, 2, STEPS, 3, again),
                _chunk(sample, 2, 3, said[3:], logprobs[3:], 2, over),
            ]
            made.append(r.LeaseEnded(sample, 2, "finished", 7, 0, over))
            left = over
        made.append(r.SampleFinished(sample, "stop", 7, left))
        apart = [0.9 * (2 * chance("apart", group, i, place) - 1) ** 5 for place in range(7)]
        mean = sum(map(abs, apart)) / 7
        differences.append(r.DifferencesRecorded(sample, STEPS, 1, 7, mean, struct.pack("<7e", *apart)))
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((one - mean) ** 2 for one in rewards) / len(rewards)) or 1.0
    made.append(r.GroupDelivered(number, 1, begin + 38.0))
    made += [
        r.SampleEnded(start + i, "consumed", "", STEPS, 1, one, (one - mean) / spread, begin + 45.0)
        for i, one in enumerate(rewards)
    ]
    return made + differences


def _chunk(
    sample: int, epoch: int, offset: int, said: list[int], logprobs: list[float], engine: int, at: float
) -> r.ChunkAccepted:
    packed = pack_logprobs(logprobs)
    return r.ChunkAccepted(sample, epoch, offset, pack_tokens(said), packed, packed, STEPS, engine, at, b"")
