"""Everything on this machine, without a GPU and without Slurm: a model, data, a cluster, a daemon, a training job, preempted engines.

    python examples/tiny-cpu/play.py [--engine reference] [--out tiny-out]

Does what README.md beside it describes, with the product's own commands, and leaves nothing running.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import JobState
from scavenger.demo.site import DemoSite, SiteOptions
from trainer.tasks import sort

ENDED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT)
POLL_S = 0.5
#: What a tiny model on two cores wants otherwise than the run.toml that `scavenger init` writes: (line, instead).
EDITS = (
    ("lr = 5e-3", "lr = 2e-4"),
    ("[trainer]", '[weights]\ndtype = "float32"\nlisten = "127.0.0.1"\n\n[trainer]'),
    ("warmup_steps = 10", "warmup_steps = 5"),
    ("wake_after_s = 30.0", "wake_after_s = 2.0"),
    ("max_tokens = 32", "max_tokens = 8"),
    ("every = 50", "every = 0"),
    ("every = 20", "every = 10"),
)


def run(argv: Sequence[str | Path]) -> None:
    """One of the product's commands, shown and run."""
    words = [str(word) for word in argv]
    print("$", " ".join("python" if word == sys.executable else word for word in words), flush=True)
    subprocess.run(
        words, check=True, env=os.environ | {"SCAVENGER_BACKEND": "local"}
    )  # whatever Slurm this machine has


def write_data(folder: Path) -> None:
    """Problems to train on and problems held out, as JSONL: sort six digits."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (("train", 4000, False), ("test", 500, True)):
        rows = (sort.prompt_task(0, index, held_out=held_out) for index in range(count))
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": text, "answer": meta["answer"]}) + "\n" for text, meta in rows)
        )


def edit(path: Path, options: argparse.Namespace) -> None:
    """As a researcher does with an editor."""
    text = path.read_text()
    wanted = (
        ("steps = 300", f"steps = {options.steps}"),
        ("prompts_per_step = 64", f"prompts_per_step = {options.prompts}"),
        ("prompts = 256", f"prompts = {options.eval_prompts}"),
    )
    for line, instead in (*EDITS, *wanted):
        if text.count(f"\n{line}") != 1:
            raise SystemExit(
                f"{path} has no line {line!r} of its own: `scavenger init` writes another file by now"
            )
        text = text.replace(f"\n{line}", f"\n{instead}")
    path.write_text(text)


def metrics(path: Path) -> Iterator[str]:
    """One line for each line of metrics.jsonl."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        said = json.loads(line)
        shown = {
            key: said[key]
            for key in ("reward", "eval_sampled", "eval_greedy", "moves")
            if isinstance(said.get(key), int | float)
        }
        yield f"step {said.get('step')}: " + "  ".join(f"{key} {value:.3g}" for key, value in shown.items())


def train(site: DemoSite, folder: Path, preempt_every_s: float) -> None:
    """Submit, take GPUs back now and then as other users do, until the job has ended."""
    job_id = site.submit_training(folder / "run.toml", ranks=1)
    print(f"submitted the training job {job_id}; its log: {site.dir / 'train.log'}", flush=True)
    shown, other_at, node = 0, time.monotonic() + preempt_every_s, 0
    while True:
        lines = list(metrics(folder / "out" / "metrics.jsonl"))
        for line in lines[shown:]:
            print(line, flush=True)
        shown = len(lines)
        job = next((job for job in site.cluster.view().jobs if job.job_id == job_id), None)
        if job is not None and job.state in ENDED and not job.flags:
            break
        if preempt_every_s and time.monotonic() >= other_at:
            node, other_at = node % 3 + 1, time.monotonic() + preempt_every_s
            site.submit_other(4.0, 4, f"node{node}")
        time.sleep(POLL_S)  # between two polls of the job
    if job.state is not JobState.COMPLETED:
        raise SystemExit(
            f"the training job ended as {job.state}; the end of its log:\n"
            + (site.dir / "train.log").read_text()[-2000:]
        )


def choose(options: argparse.Namespace) -> argparse.Namespace:
    """The engine, and what follows from it: one of vLLM takes some twenty seconds to start, which two cores do for one at a time."""
    if options.engine is None:
        options.engine = "vllm" if importlib.util.find_spec("vllm") else "reference"
        print(
            f"engine: {options.engine}, as vLLM is {'' if options.engine == 'vllm' else 'not '}installed here",
            flush=True,
        )
    engines, every_s = (1, 60.0) if options.engine == "vllm" else (2, 15.0)
    options.engines = engines if options.engines is None else options.engines
    options.preempt_every_s = every_s if options.preempt_every_s is None else options.preempt_every_s
    return options


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tiny-out"), help="a new folder")
    parser.add_argument(
        "--engine", choices=("vllm", "reference"), help="default: vllm where this Python has it"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16, help="of a step; 8 answers each")
    parser.add_argument("--eval-prompts", type=int, default=128)
    parser.add_argument("--warm-up", type=int, default=70, help="supervised steps of the model")
    parser.add_argument(
        "--engines", type=int, help="harvested engines at most; default: 1 of vllm, 2 of reference"
    )
    parser.add_argument(
        "--preempt-every-s",
        type=float,
        help="other users' jobs; 0 = none; default: 60 with vllm, 15 with reference",
    )
    options = choose(parser.parse_args(argv))
    out = options.out.resolve()
    out.mkdir(parents=True)
    run(
        [
            sys.executable,
            "-m",
            "trainer.tiny",
            "make",
            "--out",
            out / "model",
            "--steps",
            str(options.warm_up),
        ]
    )
    write_data(out / "data")
    patience = {"suspect_s": 20.0, "dead_s": 60.0}  # engines share two cores with everything else
    with DemoSite(
        SiteOptions(
            "local", out / "site", demo_layout(grace_s=3.0), max_engines=options.engines, daemon=patience
        )
    ) as site:
        init = [sys.executable, "-m", "scavenger", "init", out / "sorting"]
        run(
            [
                *init,
                "--model",
                out / "model",
                "--data",
                out / "data",
                "--engine",
                options.engine,
                "--gpus",
                "0",
                "--reward",
                "trainer.verifiers:exact",
                "--state-dir",
                site.state_dir,
            ]
        )
        edit(out / "sorting" / "run.toml", options)
        run([*init, "--check"])
        train(site, out / "sorting", options.preempt_every_s)
        for report in ("reward_per_step", "preemptions", "throughput"):
            run([sys.executable, "-m", "scavenger", "ledger", "report", report, "--config", site.config_path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
