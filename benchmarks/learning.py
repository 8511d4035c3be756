"""Does a run learn the same through preempted vLLM engines as through the undisturbed reference engine?

    python benchmarks/learning.py [--seeds 5] [--steps 200] [--out learning-out]
    python benchmarks/learning.py --arms k0 k1 k4 k8 k8off [--seeds 5]      # bounded staleness
    python benchmarks/learning.py --arms k0 k4 --first-seed 2 --seeds 3       # seeds 2, 3 and 4, into the folder of an earlier call
    python benchmarks/learning.py --seeds 1 --steps 4 --eval-prompts 16 --warm-up 5 --arms reference vllm       # does it run?

The tiny task (sort six digits, Qwen3 of 0.8 M parameters), the same model, problems and settings in each arm, and per seed one pair of:

    reference     the reference engine beside the trainer, nobody preempted
    vllm          vLLM engines (CPU) as harvested jobs beside one reserved, whose GPUs other users take every few seconds

and two controls on the same engines: `uncorrected` is `vllm` with importance correction off, `random` is `reference` with rewards that say
nothing. The figure is the accuracy of sampled completions on held-out prompts after the last step; the goal is that the 90 % confidence
interval of the paired difference vllm - reference (Student's t) lies within +-0.03, and that `random` learns nothing. An arm that was to be
preempted and in which no sample moved proves nothing, and is told. Needs vLLM.

`k0`, `k1`, `k4` and `k8`: `algorithm.max_off_policy_steps` of so many, with correction, on preempted reference engines; the differences
are to k0 of the same seed. The mean age of what was trained is told: one that stays at 0 proves nothing. `k8off` is `k8` without the
correction, a control: its harm is visible if the whole interval of k8off - k0 is below 0. What is trained is hardly old where generation
is what a step waits for, whatever k is; with `--reward-s` each reward takes so many seconds, as of a slow judge, and engines generate
meanwhile.

Writes <out>/learning.json and learning.svg, over all runs that the folder has, of this call and of earlier ones.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder: a benchmark in it has the name of a package.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "benchmarks")]

from scavenger import toml  # noqa: E402  after the path, as all that follows
from scavenger.cluster.layout import demo_layout  # noqa: E402
from scavenger.cluster.model import JobState  # noqa: E402
from scavenger.demo.site import DemoSite, SiteOptions  # noqa: E402
from scavenger.observe import plots  # noqa: E402
from trainer.tasks import sort  # noqa: E402

WITHIN = 0.03
LEARNT_NOTHING = 0.05  # more than the model it began with: what random rewards may at most seem to teach
#: Student's t, two-sided 90 %, by degrees of freedom.
T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
ENDED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT)
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    engine: str
    preempted: bool
    colour: str
    importance: str = "truncate"
    reward: str = "trainer.tasks.sort:reward"
    k: int = 0  # algorithm.max_off_policy_steps

    @property
    def uncorrected_age(self) -> bool:
        return self.k > 0 and self.importance == "off"


ARMS = (
    Arm("reference", "reference", False, "#1f77b4"),
    Arm("vllm", "vllm", True, "#d62728"),
    Arm("uncorrected", "vllm", True, "#ff7f0e", importance="off"),
    Arm("random", "reference", False, "#7f7f7f", reward="benchmarks.learning:coin"),
    Arm("k0", "reference", True, "#9467bd"),
    Arm("k1", "reference", True, "#8c564b", k=1),
    Arm("k4", "reference", True, "#e377c2", k=4),
    Arm("k8", "reference", True, "#17becf", k=8),
    Arm("k8off", "reference", True, "#bcbd22", importance="off", k=8),
)
#: What an arm's last accuracy is compared with, of the same seed; those whose difference has no goal.
COMPARED = {
    "vllm": "reference",
    "uncorrected": "reference",
    "k1": "k0",
    "k4": "k0",
    "k8": "k0",
    "k8off": "k0",
}
NO_GOAL = frozenset({"uncorrected", "k8off"})
#: Whose harm is what they were made to show.
CONTROLS = frozenset({"k8off"})
DEFAULT_ARMS = ("reference", "vllm", "uncorrected", "random")


def coin(prompt: str, completion: str, meta: dict[str, Any]) -> float:
    """A reward that says nothing: a coin that falls the same way for the same prompt and completion. In evaluations the truth is wanted."""
    if meta.get("mode"):
        return float(completion == meta["answer"])
    return float(hashlib.blake2b(f"{prompt}/{completion}".encode(), digest_size=1).digest()[0] & 1)


async def slow(prompt: str, completion: str, meta: dict[str, Any], *, seconds: float) -> float:
    """The task's own reward, as late as a slow judge's. Evaluations are not slowed."""
    if not meta.get("mode"):
        await asyncio.sleep(seconds)
    return sort.reward(prompt, completion, meta)


def reward_sections(arm: Arm, reward_s: float) -> dict[str, dict[str, Any]]:
    if not reward_s:
        return {"reward": {"function": arm.reward}}
    function = {"function": "benchmarks.learning:slow", "timeout_s": 30.0 + reward_s, "concurrency": 1024}
    return {"reward": function, "reward.options": {"seconds": reward_s}}


def document(
    arm: Arm, seed: int, model: Path, site: DemoSite, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The run.toml of one arm. Pure but for the paths."""
    name = f"{arm.name}-{seed}"
    return {
        "run": {
            "name": name,
            "seed": seed,
            "steps": options.steps,
            "state_dir": site.state_dir,
            "out_dir": site.dir / name,
            "harvest": arm.preempted,
            "max_engines": options.engines,
        },
        "model": {"path": model, "context_length": 32},
        "data": {"task": "sort", "prompts_per_step": options.prompts, "samples_per_prompt": 8, "seed": seed},
        "sampling": {"max_tokens": 7},
        "engine": {"name": arm.engine, "max_batch": 96},
        **reward_sections(arm, options.reward_s),
        "algorithm": {
            "name": "grpo",
            "importance": arm.importance,
            "allow_uncorrected": arm.uncorrected_age,
            "max_off_policy_steps": arm.k,
        },
        "optimizer": {"lr": options.lr, "warmup_steps": min(20, options.steps), "betas": [0.9, 0.99]},
        "reserved": {"workers": 1, "window": 0.35, "wake_after_s": 5.0},
        "checkpoint": {"every": max(1, options.steps), "keep": 1},
        "eval": {"every": options.eval_every, "prompts": options.eval_prompts, "samples": 2},
        "weights": {"dtype": options.weights_dtype},
    }


def make_model(folder: Path, seed: int, warm_up: int) -> None:
    if not (folder / "model.safetensors").is_file():
        argv = [
            sys.executable,
            "-m",
            "trainer.tiny",
            "make",
            "--out",
            str(folder),
            "--seed",
            str(seed),
            "--steps",
            str(warm_up),
        ]
        subprocess.run(argv, check=True, cwd=ROOT)


def run_arm(arm: Arm, seed: int, model: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run from its first evaluation to its last."""
    began = time.monotonic()
    timeouts = {"suspect_s": 20.0, "dead_s": 60.0}  # engines share the machine's cores with the trainer
    with DemoSite(
        SiteOptions("local", out, demo_layout(grace_s=3.0), max_engines=options.engines, daemon=timeouts)
    ) as site:
        run_toml = out / "run.toml"
        run_toml.write_text(toml.dumps(document(arm, seed, model, site, options)))
        job_id = site.submit_training(
            run_toml, ranks=1, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        )
        taken, other_at = 0, time.monotonic() + options.preempt_every_s
        while True:
            job = next((one for one in site.cluster.view().jobs if one.job_id == job_id), None)
            if job is not None and job.state in ENDED and not job.flags:
                break
            if arm.preempted and time.monotonic() >= other_at:
                site.submit_other(4.0, 4, f"node{taken % 3 + 1}")
                taken, other_at = taken + 1, time.monotonic() + options.preempt_every_s
            time.sleep(POLL_S)  # between two looks at the job
    if job.state is not JobState.COMPLETED:
        raise SystemExit(
            f"{arm.name}, seed {seed}: the training job ended as {job.state}; its log: {out / 'train.log'}"
        )
    return read(out / f"{arm.name}-{seed}" / "metrics.jsonl") | {
        "arm": arm.name,
        "seed": seed,
        "others_jobs": taken,
        "seconds": time.monotonic() - began,
    }


def read(path: Path) -> dict[str, Any]:
    """Curves from a run's metrics.jsonl."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    train, held_out = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    return {
        "eval_steps": [line["step"] for line in held_out],
        "sampled": [line["eval_sampled"] for line in held_out],
        "greedy": [line["eval_greedy"] for line in held_out],
        "reward": [line["reward"] for line in train],
        "moves": sum(line["moves"] for line in train),
        "age": statistics.fmean(line.get("staleness_mean", 0.0) for line in train),
        "oldest": max(line.get("staleness_max", 0.0) for line in train),
        "set_aside": sum(line["engines_set_aside"] for line in train),
        "mismatch_k3": statistics.fmean(line["mismatch_k3"] for line in train),
    }


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean and 90 % confidence interval of paired differences; with one pair the interval is the point, which says nothing."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, mean, mean
    half = T90.get(len(differences) - 1, 1.83) * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def verdict(found: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """What the runs say, and whether the goals are met."""
    of = {(one["arm"], one["seed"]): one for one in found}
    seeds = sorted({one["seed"] for one in found})
    report_lines, fine = [], True
    for arm in ARMS:
        mine = [of[arm.name, seed] for seed in seeds if (arm.name, seed) in of]
        if not mine:
            continue
        first, last = (statistics.fmean(one["sampled"][place] for one in mine) for place in (0, -1))
        moves = sum(one["moves"] for one in mine)
        report_lines.append(
            f"{arm.name:12} sampled {first:.3f} -> {last:.3f}  moved samples {moves:.0f}  mismatch k3 {mine[0]['mismatch_k3']:.1e}"
        )
        if arm.preempted and not moves:
            report_lines.append(
                f"{arm.name}: no sample was moved, so preemption was not tested: lower --preempt-every-s"
            )
            fine = False
        if arm.k:
            age = statistics.fmean(one["age"] for one in mine)
            oldest = max(one.get("oldest", 0.0) for one in mine)
            report_lines.append(
                f"{arm.name}: mean age of what was trained {age:.2f} versions, the oldest {oldest:.0f} of {arm.k}"
            )
            if not age:
                report_lines.append(f"{arm.name}: nothing was stale, so staleness was not tested")
                fine = False
        if aside := sum(one.get("set_aside", 0.0) for one in mine):
            report_lines.append(
                f"{arm.name}: {aside:.0f} engines were set aside as wrong, and their samples masked"
            )
            fine = False
        if arm.name == "random" and last - first > LEARNT_NOTHING:
            report_lines.append("random rewards taught something: the comparison cannot be trusted")
            fine = False
    for name, base in COMPARED.items():
        both = [seed for seed in seeds if {(name, seed), (base, seed)} <= of.keys()]
        pairs = [of[name, seed]["sampled"][-1] - of[base, seed]["sampled"][-1] for seed in both]
        if pairs:
            mean, low, high = interval(pairs)
            within = len(pairs) > 1 and low >= -WITHIN and high <= WITHIN
            if name in CONTROLS:
                where = "the harm is visible" if len(pairs) > 1 and high < 0 else "no harm is visible"
            else:
                where = f"within +-{WITHIN}" if within else f"not shown to be within +-{WITHIN}"
            report_lines.append(
                f"{name} - {base}: {mean:+.4f}, 90 % interval [{low:+.4f}, {high:+.4f}] of {len(pairs)} pairs: {where}"
            )
            fine = fine and (within or name in NO_GOAL)
    return report_lines, fine


def kept_runs(out: Path) -> list[dict[str, Any]]:
    """All runs that a folder has, of this call and of earlier ones, by seed and by the arms' order."""
    order = {arm.name: place for place, arm in enumerate(ARMS)}
    names = (path for path in out.glob("*-*.json") if path.stem.rpartition("-")[0] in order)
    found = [json.loads(path.read_text()) for path in names]
    return sorted(found, key=lambda one: (one["seed"], order[one["arm"]]))


def plot(found: list[dict[str, Any]]) -> str:
    """Held-out sampled accuracy over steps, one line a run, in one SVG. Pure."""
    width, height, left, below = 720, 400, 50, 40
    last = max(one["eval_steps"][-1] for one in found) or 1
    colours = {arm.name: arm.colour for arm in ARMS}

    def y(value: float) -> float:
        return height - below - value * (height - below - 20)

    def points(run: dict[str, Any]) -> str:
        pairs = zip(run["eval_steps"], run["sampled"], strict=True)
        return " ".join(
            f"{left + step / last * (width - left - 20):.1f},{y(value):.1f}" for step, value in pairs
        )

    return plots.render(
        "benchmarks/learning.svg.j2",
        width=width,
        height=height,
        left=left,
        last=last,
        ticks=[(f"{tick / 10:.1f}", y(tick / 10)) for tick in range(0, 11, 2)],
        curves=[(colours[run["arm"]], points(run)) for run in found],
        arms=[arm for arm in ARMS if any(run["arm"] == arm.name for run in found)],
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("learning-out"), help="a new folder, or one to go on in"
    )
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], default=list(DEFAULT_ARMS))
    for name, default, what in (
        ("seeds", 5, "so many"),
        ("first-seed", 0, "the first of them"),
        ("steps", 200, ""),
        ("prompts", 32, "of a step; 8 completions each"),
        ("eval-prompts", 1024, "held out"),
        ("eval-every", 25, "steps"),
        ("warm-up", 70, "supervised steps of the model"),
        ("engines", 1, "harvested engines at most"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--reward-s", type=float, default=0.0, help="seconds that each reward takes; 0: none")
    parser.add_argument("--preempt-every-s", type=float, default=30.0)
    parser.add_argument(
        "--weights-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="what engines are given"
    )
    options = parser.parse_args(argv)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        make_model(out / f"model-{seed}", seed, options.warm_up)
        for arm in (arm for arm in ARMS if arm.name in options.arms):
            kept = out / f"{arm.name}-{seed}.json"  # a run that is done is not done again
            if not kept.is_file():
                one = run_arm(arm, seed, out / f"model-{seed}", out / f"site-{arm.name}-{seed}", options)
                kept.write_text(json.dumps(one))
            shown = json.loads(kept.read_text())
            print(
                f"seed {seed} {arm.name:12} sampled {' '.join(f'{v:.3f}' for v in shown['sampled'])}  moved {shown['moves']:.0f}  "
                f"{shown['seconds']:.0f} s",
                flush=True,
            )
            (out / "learning.svg").write_text(plot(kept_runs(out)))
    found = kept_runs(out)
    report_lines, fine = verdict(found)
    (out / "learning.json").write_text(
        json.dumps({"runs": found, "verdict": report_lines, "met": fine}, indent=1)
    )
    print("\n".join(report_lines))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
