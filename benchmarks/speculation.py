"""What are siblings worth as drafts: tokens a verification by their number, and tokens a second with and without.

    python benchmarks/speculation.py [--tasks sort,text] [--rounds 7] [--out speculation-out]
    python benchmarks/speculation.py --spread --groups 24                                     # groups over two engines
    python benchmarks/speculation.py --train-steps 5 --groups 2 --samples 4 --rounds 1        # does it run?

Two small models are trained here, in a minute or two each on one core (0.8 M parameters, as the demo's):

    sort    sorts 20 digits, as its prompt asks in rising or in falling order: what a run with a checked answer comes to
    text    continues the pages of `docs/`, letter by letter, at temperature 1: an open end, where siblings part soon

*Acceptance* is counted on completions that the trained model sampled in the reference engine, those of prompts that it was not trained on.
One sample is played again: before each pass its draft is made from its own text and from n siblings that are done, up to `--draft`
tokens; what agrees with the recorded tokens is accepted, and the pass makes one more, as in the engine. Tokens over passes is
the mean. Seer's 1.70 to 2.53 stand beside as *published* (arXiv 2511.14617): its models, tasks and drafts differ, so they are no baseline
for ours.

*Throughput* is the reference engine's, of whole groups that start together, siblings known only as far as they are: `none` and `group` in
turns within one run, tokens a second of CPU (one thread: other processes may share the machine), median and range of the rounds, and of
each round's ratio. The last column is what the engine's own
length policy chose to verify.

`--spread` plays the same completions on engines that have a group's samples between them, with the siblings' tokens that the daemon
sends and without, in virtual time (`speculation_spread`), instead of the throughput. `two engines`: a group's samples are on both.
`taken`: half of a group is complete when its engine is preempted, and the fresh engine that takes the rest is counted.
Writes <out>/speculation.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder: a benchmark in it has the name of a package.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "benchmarks")]

import torch  # noqa: E402  after the path, as all that follows
from msgspec.structs import replace  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from benchmarks.speculation_spread import Found, Spread, SpreadRun  # noqa: E402
from rollout.engines.base import Engine, EngineHost  # noqa: E402
from rollout.engines.reference import build  # noqa: E402
from rollout.engines.speculation.groups import Groups  # noqa: E402
from scavenger.config.site import RouterSection  # noqa: E402
from scavenger.protocol.messages import EngineSpec, SampleKey, Sampling  # noqa: E402
from scavenger.protocol.worker.events import Request  # noqa: E402
from scavenger.weights import manifest as manifests  # noqa: E402
from trainer.tiny import model_config  # noqa: E402

#: Mean acceptance length as published by Seer: without references, and with most.
PUBLISHED = (1.70, 2.53)
SIBLINGS = (0, 1, 3, 7, 15)
DIGITS = 20
SORT_ALPHABET = "0123456789<>=."
BATCH, LEARNING_RATE = 64, 3e-3
#: Bytes a second to each engine, as the daemon sends them where nothing else is configured.
SENT = float(RouterSection().sibling_bytes_per_s)
#: Name, samples that an engine takes at once, whether it is preempted.
SPREADS = (
    ("two engines of 1 slot", 1, False),
    ("two engines of 4 slots", 4, False),
    ("two engines of 8 slots", 8, False),
    ("taken, 4 slots", 4, True),
)


@dataclass(frozen=True, slots=True)
class Task:
    """What a model is trained on and asked. `batch(step)`: rows of token ids, of which those behind the first `given` are learnt."""

    name: str
    vocabulary: int
    given: int
    completion: int
    stops: tuple[int, ...]
    batch: Callable[[int], list[list[int]]]
    prompt: Callable[[int], tuple[int, ...]]


def sort_task() -> Task:
    def prompt(rng: Random) -> str:
        return "".join(rng.choices("0123456789", k=DIGITS)) + rng.choice("<>") + "="

    def answer(asked: str) -> str:
        return "".join(sorted(asked[:DIGITS], reverse=asked[DIGITS] == ">")) + "."

    def ids(text: str) -> list[int]:
        return [SORT_ALPHABET.index(letter) for letter in text]

    def batch(step: int) -> list[list[int]]:
        rng = Random(f"train/{step}")
        return [ids(one + answer(one)) for one in (prompt(rng) for _ in range(BATCH))]

    return Task(
        "sort",
        len(SORT_ALPHABET),
        DIGITS + 2,
        DIGITS + 1,
        (SORT_ALPHABET.index("."),),
        batch,
        lambda index: tuple(ids(prompt(Random(f"held out/{index}")))),
    )


def text_task() -> Task:
    """The pages of `docs/`; the last tenth of each is held out."""
    pages = [page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md"))]
    letters = sorted(set(b"".join(pages)))
    codes = {letter: code for code, letter in enumerate(letters)}
    given, width = 32, 128
    cuts = [len(page) * 9 // 10 for page in pages]
    pages_train = [page[:cut] for page, cut in zip(pages, cuts, strict=True) if cut > width]
    pages_held = [page[cut:] for page, cut in zip(pages, cuts, strict=True) if len(page) - cut > width]

    def piece(rng: Random, source: Sequence[bytes], length: int) -> list[int]:
        page = source[rng.choices(range(len(source)), [len(one) for one in source])[0]]
        start = rng.randrange(len(page) - length)
        return [codes[letter] for letter in page[start : start + length]]

    def batch(step: int) -> list[list[int]]:
        rng = Random(f"train/{step}")
        return [piece(rng, pages_train, width) for _ in range(BATCH // 2)]

    return Task(
        "text",
        len(letters),
        1,
        96,
        (),
        batch,
        lambda index: tuple(piece(Random(f"held out/{index}"), pages_held, given)),
    )


TASKS = {"sort": sort_task, "text": text_task}


def trained(task: Task, steps: int) -> tuple[str, Any, float]:
    """config.json, the trained model, and the last loss in nats a token."""
    values = model_config() | {"vocab_size": -(-task.vocabulary // 16) * 16, "max_position_embeddings": 256}
    config = dict(values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    found: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, (steps - step) / (steps / 4))
        rows = torch.tensor(task.batch(step))
        logits = model(input_ids=rows[:, :-1]).logits[:, task.given - 1 :]
        loss = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), rows[:, task.given :].reshape(-1)
        )
        loss.backward()  # type: ignore[no-untyped-call]  # torch types it not
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return json.dumps(values), model.eval().requires_grad_(False), statistics.fmean(found[-10:])


def requests_of(task: Task, groups: int, samples: int, first: int = 0) -> list[Request]:
    how = Sampling(max_tokens=task.completion, stop_token_ids=task.stops)
    return [
        Request(
            (first + group) * samples + index + 1,
            task.prompt(first + group),
            (),
            task.completion,
            how,
            7,
            SampleKey("train", 1, first + group, index),
        )
        for group in range(groups)
        for index in range(samples)
    ]


async def engine_of(text: str, model: Any, batch: int, speculation: Any) -> Engine:
    tensors = {}
    for name, parameter in model.named_parameters():
        data = bytearray(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        tensors[name] = ("float32", tuple(parameter.shape), memoryview(data))
    spec = EngineSpec("reference", text, "float32", batch, 256)
    engine = await build(replace(spec, speculation=speculation), EngineHost("bench"))
    manifest, blob = manifests.build(1, tensors)
    await engine.load(1, manifests.views(manifest, blob))
    return engine


async def completed(engine: Engine, requests: Sequence[Request]) -> dict[int, tuple[int, ...]]:
    """The tokens of each request, by handle."""
    made: dict[int, tuple[int, ...]] = {one.handle: () for one in requests}
    for one in requests:
        await engine.add(one)
    left = set(made)
    while left:
        for delta in await engine.next():
            if delta.error:
                raise SystemExit(f"the engine failed: {delta.error}")
            made[delta.handle] += delta.token_ids
            if delta.finish:
                left.discard(delta.handle)
    return made


def tokens_a_pass(
    prompt: tuple[int, ...], siblings: Sequence[Sequence[int]], sample: Sequence[int], most: int
) -> tuple[int, int]:
    """Tokens and passes that a sample takes, if its siblings are done: the first token comes with the prefill, and costs no pass."""
    groups = Groups()
    for index, one in enumerate(siblings):
        groups.enter(-1 - index, "group", index, prompt, one)
    groups.enter(0, "group", len(siblings), prompt, sample[:1])
    at, passes = 1, 0
    while at < len(sample):
        draft = groups.draft(0, min(most, len(sample) - at - 1)).tokens
        right = next((i for i, token in enumerate(draft) if token != sample[at + i]), len(draft))
        groups.extend(0, sample[at : at + right + 1])
        at += right + 1
        passes += 1
    return len(sample) - 1, passes


def acceptance(
    task: Task, requests: Sequence[Request], made: dict[int, tuple[int, ...]], options: argparse.Namespace
) -> dict[int, float]:
    """Mean tokens a verification, by number of siblings."""
    found = {}
    for n in SIBLINGS:
        if n >= options.samples:
            continue
        tokens = passes = 0
        for start in range(0, len(requests), options.samples):
            group = requests[start : start + options.samples]
            for place, one in enumerate(group):
                others = [group[(place + 1 + i) % len(group)].handle for i in range(n)]
                more = tokens_a_pass(one.prompt, [made[h] for h in others], made[one.handle], options.draft)
                tokens, passes = tokens + more[0], passes + more[1]
        found[n] = tokens / max(passes, 1)
    return found


def spread_over_engines(
    task: Task, requests: Sequence[Request], made: dict[int, tuple[int, ...]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Tokens a verification with siblings' tokens from other engines over those without, a ratio each `--round-groups` groups."""
    a_round = options.round_groups * options.samples
    rounds = [requests[at : at + a_round] for at in range(0, len(requests) - a_round + 1, a_round)]
    found = []
    for pass_s in options.pass_s:
        for name, slots, taken in SPREADS:

            def play(
                part: Sequence[Request], engines: int, slots: int, rate: float, taken: int, pass_s: float
            ) -> Found:
                prompts = [part[at].prompt for at in range(0, len(part), options.samples)]
                said = {divmod(at, options.samples): made[one.handle] for at, one in enumerate(part)}
                how = Spread(engines, slots, pass_s, options.draft, rate, taken)
                return SpreadRun(prompts, said, task.stops, task.completion, how).play()

            means: dict[str, list[float]] = {"without": [], "with": [], "all on one": []}
            bytes_a_token = []
            for part in rounds:
                # A preempted engine has one group: its end is the moment that is looked at.
                parts = [part[at : at + options.samples] for at in range(0, len(part), options.samples)]
                for setting, rate in (("without", 0.0), ("with", SENT), ("all on one", 0.0)):
                    if taken and setting == "all on one":
                        continue
                    engines, room = (1, 2 * slots) if setting == "all on one" else (1 if taken else 2, slots)
                    all_of_it = [
                        play(one, engines, room, rate, taken and options.samples // 2, pass_s)
                        for one in (parts if taken else [part])
                    ]
                    tokens, passes = (
                        sum(one.tokens for one in all_of_it),
                        sum(one.passes for one in all_of_it),
                    )
                    means[setting].append(tokens / max(passes, 1))
                    if setting == "with":
                        bytes_a_token.append(sum(one.nbytes for one in all_of_it) / max(tokens, 1))
            ratios = [b / a for a, b in zip(means["without"], means["with"], strict=True)]
            print(
                f"  {name:24} {1 / pass_s:5.1f} passes a second: without {spread(means['without'], 2)}, with {spread(means['with'], 2)}, "
                f"all on one {spread(means['all on one'], 2) if means['all on one'] else '-'}; "
                f"ratio {spread(ratios, 3)}; {spread(bytes_a_token, 2)} bytes sent a token"
            )
            found.append(
                {"setting": name, "pass_s": pass_s, **means, "ratio": ratios, "bytes_a_token": bytes_a_token}
            )
    return found


async def throughput(
    task: Task, text: str, model: Any, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of CPU of `none` and `group`, in turns, and whether both made the same tokens."""
    engines = {mode: await engine_of(text, model, batch, mode) for mode in ("none", "group")}
    rates: dict[str, list[float]] = {mode: [] for mode in engines}
    differing = 0
    groups = max(1, batch // 8) * options.rate_groups
    for round_ in range(options.rounds + 1):
        tokens: dict[str, dict[int, tuple[int, ...]]] = {}
        for mode in (("none", "group"), ("group", "none"))[round_ % 2]:
            # New prompts each round: what was said in the last one is another group's.
            asked = requests_of(task, groups, 8, first=1000 + round_ * groups)
            began = time.process_time()
            tokens[mode] = await completed(engines[mode], asked)
            seconds = time.process_time() - began
            if round_:  # the first warms up
                rates[mode].append(sum(map(len, tokens[mode].values())) / seconds)
        differing += sum(tokens["none"][h] != tokens["group"][h] for h in tokens["none"])
    total = engines["group"].speculated()
    for engine in engines.values():
        await engine.close()
    ratios = [b / a for a, b in zip(rates["none"], rates["group"], strict=True)]
    return {
        "batch": batch,
        "none": rates["none"],
        "group": rates["group"],
        "ratio": ratios,
        "differing": differing,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "verifications": total.verifications,
    }


def spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


async def play(name: str, options: argparse.Namespace) -> dict[str, Any]:
    task = TASKS[name]()
    began = time.monotonic()
    text, model, loss = trained(task, options.train_steps)
    print(
        f"\n{name}: trained {options.train_steps} steps in {time.monotonic() - began:.0f} s, loss {loss:.3f} nats a token"
    )
    requests = requests_of(task, options.groups, options.samples)
    engine = await engine_of(text, model, 64, "none")
    made = await completed(engine, requests)
    await engine.close()
    found = acceptance(task, requests, made, options)
    print(
        f"tokens a verification, drafts of {options.draft} at most; {len(made)} completions, {sum(map(len, made.values()))} tokens"
    )
    for n, mean in found.items():
        print(f"  {n:2} siblings: {mean:.2f}")
    if options.spread:
        print(
            "tokens a verification of groups that are spread, with siblings' tokens from other engines and without"
        )
        return {"task": name, "loss": loss, "spread": spread_over_engines(task, requests, made, options)}
    rates = []
    print(
        "tokens a second of CPU                none              group             group / none       tokens a verification"
    )
    for batch in (1, 8, 64):
        one = await throughput(task, text, model, batch, options)
        rates.append(one)
        mean = 1 + one["accepted"] / one["verifications"] if one["verifications"] else 1.0
        print(
            f"  {batch:2} at once                    {spread(one['none']):>20} {spread(one['group']):>20} {spread(one['ratio'], 2):>18}"
            f"   {mean:.2f} in {one['verifications']:,}; {one['differing']} samples differ"
        )
    return {
        "task": name,
        "loss": loss,
        "tokens_a_verification": found,
        "throughput": rates,
        "draft": options.draft,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default="sort,text")
    parser.add_argument("--train-steps", type=int, default=400)
    parser.add_argument("--groups", type=int, default=24, help="held-out prompts whose acceptance is counted")
    parser.add_argument("--samples", type=int, default=16, help="of each")
    parser.add_argument("--draft", type=int, default=16, help="tokens of a draft at most")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--rate-groups",
        type=int,
        default=1,
        help="groups of eight for each eight slots, in each round of the throughput",
    )
    parser.add_argument("--spread", action="store_true", help="groups over several engines, no throughput")
    parser.add_argument("--round-groups", type=int, default=4, help="groups of one round of --spread")
    parser.add_argument(
        "--pass-s",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[1 / 30, 0.3],
        help="seconds of a pass in --spread",
    )
    parser.add_argument("--out", type=Path, default=Path("speculation-out"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = [asyncio.run(play(name, options)) for name in options.tasks.split(",")]
    print(f"\nSeer, *published*: {PUBLISHED[0]:.2f} without references to {PUBLISHED[1]:.2f} with most")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "speculation.json").write_text(
        json.dumps({"published": PUBLISHED, "found": found}, indent=1)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
