"""Tokens a second of our training step against TRL's GRPOTrainer step: the same model, samples, loss and threads, in one process.

    python benchmarks/trainer.py [--steps 10] [--hidden 128 --layers 4 --vocabulary 1024] [--json out.json]

Both sides get the same finished samples (prompt, completion, advantage) and do the rest of a step: forward, loss, backward over all
micro-batches, clipping, AdamW (fused). TRL's side is its own loop (`GRPOTrainer.train`), timed from `on_step_begin` to `on_step_end`; only
its generation is replaced by the finished samples. After each of TRL's steps one of ours is taken, so both see the same machine. Lengths of
completions are lognormal (sigma 0.6) or all equal. The loss is DAPO's token mean, TRL's default; gradients of the two sides are compared.

TRL at its best documented setting: activation checkpointing off (it is on by default), sdpa, fused AdamW, and the fastest of several
per_device_train_batch_size, as ours gets the fastest of several micro_batch_tokens. It has no padding-free mode for GRPO.
Needs the extra [trl].
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
warnings.filterwarnings("ignore")
# A script's own folder stands first on the path, and there this file would hide the package of its name.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]

import torch  # noqa: E402  after the environment, as all that follows
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils.logging import set_verbosity_error  # noqa: E402

from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection  # noqa: E402
from scavenger.protocol import messages  # noqa: E402
from trainer.algorithms.rows import resolve  # noqa: E402
from trainer.data.batching import TrainRow, balanced  # noqa: E402
from trainer.loop import comm  # noqa: E402
from trainer.model.learner import Learner  # noqa: E402

SIGMA = 0.6
LR = 1e-6
#: Seconds that pass, or seconds that this process computed: on one thread of a machine that others load, the second tells more.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CLOCK = "wall"
MOST_GAP = 1e-4  # of the largest gradient, between the two sides
GOALS = {"lognormal": 1.3, "equal": 1.0}


@dataclass(frozen=True, slots=True)
class Case:
    """One step's samples: `completions[i]` belongs to prompt i // siblings."""

    name: str
    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: list[float]
    siblings: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.completions)) + sum(
            len(self.prompts[i // self.siblings]) for i in range(len(self.completions))
        )


def make_case(name: str, options: argparse.Namespace) -> Case:
    rng = random.Random(options.seed)
    count = options.prompts * options.siblings
    drawn = [rng.lognormvariate(0.0, SIGMA) for _ in range(count)]
    scale = options.length * count / sum(drawn)
    lengths = [max(2, min(options.context - options.prompt_tokens, round(value * scale))) for value in drawn]
    if name == "equal":
        lengths = [round(statistics.mean(lengths))] * count
    words = range(2, options.vocabulary)
    prompts = [rng.choices(words, k=options.prompt_tokens) for _ in range(options.prompts)]
    return Case(
        name,
        prompts,
        [rng.choices(words, k=n) for n in lengths],
        [rng.gauss(0, 1) for _ in lengths],
        options.siblings,
    )


def make_model(folder: Path, options: argparse.Namespace) -> int:
    """A random Qwen3 with a word-level tokenizer; returns how many parameters it has."""
    heads = max(1, options.hidden // 32)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 32,
        "max_position_embeddings": options.context,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, options.vocabulary)}
    Tokenizer(models.WordLevel(words, unk_token="<pad>")).save(str(folder / "tokenizer.json"))
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    state = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(value.numel() for value in state.values())


class Ours:
    """The product's learner on one rank, fed as `trainer.loop.step` feeds it."""

    def __init__(self, folder: Path, mesh: DeviceMesh, case: Case, budget: int) -> None:
        recipe = resolve(
            AlgorithmSection(name="dapo", dynamic_sampling=False, importance="off"),
            max(map(len, case.completions)),
        )
        self._learner = Learner(
            folder,
            mesh,
            recipe=recipe,
            optimizer=OptimizerSection(lr=LR, clip_norm=1e9, betas=(0.9, 0.999)),
            temperature=1.0,
            deterministic=False,
            trainer=TrainerSection(micro_batch_tokens=budget),
        )
        rows = [
            TrainRow(
                i,
                messages.pack_tokens(case.prompts[i // case.siblings]),
                messages.pack_tokens(completion),
                bytes(4 * len(completion)),
                case.advantages[i],
            )
            for i, completion in enumerate(case.completions)
        ]
        self._groups = [rows[start : start + case.siblings] for start in range(0, len(rows), case.siblings)]
        self._budget = budget
        self._denominator = float(sum(map(len, case.completions)))

    def _train(self) -> None:
        for (micro,) in balanced(self._groups, budget=self._budget, ranks=1):
            self._learner.train(micro)

    def step(self) -> float:
        """Seconds."""
        began = CLOCKS[CLOCK]()
        self._train()
        self._learner.update(self._denominator, LR)
        return CLOCKS[CLOCK]() - began

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the whole step; none is taken."""
        self._train()
        found = {
            name: _plain(p.grad) / self._denominator
            for name, p in self._learner.trained().items()
            if p.grad is not None
        }
        self._learner.discard_gradients()
        return found


def _plain(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Times TRL's steps. After the first, which warms up and shows its gradients, one of ours follows each, outside TRL's time."""

    def __init__(self, ours: Ours | None) -> None:
        self._ours = ours
        self._began = 0.0
        self.gradients: dict[str, torch.Tensor] = {}
        self.theirs_s: list[float] = []
        self.ours_s: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = CLOCKS[CLOCK]()

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        if not self.gradients:
            self.gradients = {
                name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
            }

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.theirs_s.append(CLOCKS[CLOCK]() - self._began)
        if self._ours is not None:
            self.ours_s.append(self._ours.step())


def run_theirs(folder: Path, case: Case, per_device: int, steps: int, ours: Ours | None, out: Path) -> Clock:
    """TRL's own loop over `steps` steps of the finished samples."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    count = len(case.completions)
    config = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=count // per_device,
        num_generations=case.siblings,
        max_completion_length=max(map(len, case.completions)),
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1e9,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        adam_beta2=0.999,
        weight_decay=0.0,
        seed=0,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    data = Dataset.from_list([{"prompt": "w2"} for _ in range(max(8, count))])
    clock = Clock(ours)
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    finished = _finished(case)
    trainer._generate_and_score_completions = lambda inputs: {
        name: value.clone() for name, value in finished.items()
    }
    trainer.train()
    return clock


def _finished(case: Case) -> dict[str, torch.Tensor]:
    """What TRL makes of generated samples: prompts padded on the left, completions on the right, to the widest of the step."""
    wide = max(map(len, case.completions))
    prompts = torch.tensor([case.prompts[i // case.siblings] for i in range(len(case.completions))])
    completions = torch.tensor(
        [completion + [0] * (wide - len(completion)) for completion in case.completions]
    )
    mask = torch.tensor(
        [[1] * len(completion) + [0] * (wide - len(completion)) for completion in case.completions]
    )
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.tensor(case.advantages),
        "num_items_in_batch": mask.sum(),
    }


def gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of two gradients, as a share of the largest gradient. Raises `ValueError` for other names."""
    theirs = {name.replace("module.", ""): value for name, value in theirs.items()}
    if ours.keys() != theirs.keys():
        raise ValueError(f"other parameters: {sorted(ours.keys() ^ theirs.keys())[:4]}")
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / largest


def measure(case: Case, folder: Path, mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, Any]:
    budgets = {budget: min(_three(Ours(folder, mesh, case, budget))) for budget in options.budgets}
    budget = min(budgets, key=lambda one: budgets[one])
    batches = {}
    for per_device in options.batches:
        if len(case.completions) % per_device == 0:
            batches[per_device] = min(
                run_theirs(folder, case, per_device, 3, None, folder / "trl").theirs_s[1:]
            )
    per_device = min(batches, key=lambda one: batches[one])
    ours = Ours(folder, mesh, case, budget)
    of_ours = ours.gradients()
    clock = run_theirs(folder, case, per_device, options.steps + 1, ours, folder / "trl")
    differ = gap(of_ours, clock.gradients)
    if differ > MOST_GAP:
        raise SystemExit(
            f"{case.name}: gradients differ by {differ:.2g} of the largest: the two sides do not compute the same loss"
        )
    mine, theirs = clock.ours_s[1:], clock.theirs_s[1:]
    ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
    rate = {
        name: case.tokens / statistics.median(values) for name, values in (("ours", mine), ("trl", theirs))
    }
    return {
        "case": case.name,
        "tokens": case.tokens,
        "widest": max(map(len, case.completions)),
        "ours_tokens_s": rate["ours"],
        "trl_tokens_s": rate["trl"],
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "goal": GOALS[case.name],
        "gradient_gap": differ,
        "ours_s": mine,
        "trl_s": theirs,
        "micro_batch_tokens": budget,
        "per_device_train_batch_size": per_device,
        "ours_by_setting_s": budgets,
        "trl_by_setting_s": batches,
    }


def _three(ours: Ours) -> list[float]:
    return [ours.step() for _ in range(3)][1:]


def main(argv: list[str] | None = None) -> int:
    global CLOCK
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (
        ("steps", 10),
        ("hidden", 128),
        ("layers", 4),
        ("vocabulary", 1024),
        ("context", 1024),
        ("prompts", 8),
        ("siblings", 8),
        ("length", 64),
        ("prompt-tokens", 16),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[1024, 2048, 4096], help="micro_batch_tokens to choose from"
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[4, 8, 16, 32],
        help="per_device_train_batch_size to choose from",
    )
    parser.add_argument("--cases", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="seconds that pass, or CPU seconds of this process",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    CLOCK = options.clock
    try:
        import trl
    except ImportError:
        print('trl is not installed: pip install "scavenger[trl]"', file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
    set_verbosity_error()
    found, mesh = [], comm.join(comm.Solo())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder, options)
        versions = f"torch {torch.__version__}, trl {trl.__version__}"
        print(
            f"{parameters / 1e6:.2f} M parameters, {torch.get_num_threads()} threads, {versions}, {options.clock} seconds",
            flush=True,
        )
        for case in options.cases:
            one = measure(make_case(case, options), folder, mesh, options)
            found.append(one)
            print(
                f"{case:9} {one['tokens']} tokens, longest completion {one['widest']}: ours {one['ours_tokens_s']:.0f} tokens/s "
                f"(micro_batch_tokens {one['micro_batch_tokens']}), TRL {one['trl_tokens_s']:.0f} "
                f"(per_device_train_batch_size {one['per_device_train_batch_size']}); "
                f"ratio {one['ratio']:.2f} [{one['ratio_low']:.2f}, {one['ratio_high']:.2f}] of {options.steps} pairs, goal {one['goal']}; "
                f"gradients differ by {one['gradient_gap']:.1e}",
                flush=True,
            )
    comm.disconnect()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(one["ratio"] >= one["goal"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
