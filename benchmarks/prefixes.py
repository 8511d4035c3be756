"""A training step with and without `trainer.share_prefixes`: tokens computed and seconds, in turns in one run.

    python benchmarks/prefixes.py [--hidden 128 --layers 4 --vocabulary 1024] [--budget 4096] [--repeats 5] [--clock cpu] [--json FILE]

A step is forward, loss and backward of all micro-batches of one rank, clipping and AdamW, of a random Qwen3 on one thread in float32 (on a
GPU bfloat16). Both sides get the same samples and the same budget, and their gradients are compared before anything is timed. Cases: groups
of eight samples with a prompt that is longer than its completions, as long, and shorter; and episodes of four turns whose later turns
branch. Each row: tokens computed, the median of seconds with their spread, and the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# A script's own folder stands first on the path, and there some files would hide packages of their names.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]

import torch  # noqa: E402  after the path, as all that follows
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection  # noqa: E402
from scavenger.protocol.messages import pack_tokens  # noqa: E402
from trainer.algorithms.rows import resolve  # noqa: E402
from trainer.data import batching, prefixes  # noqa: E402
from trainer.data.batching import TrainRow  # noqa: E402
from trainer.loop import comm  # noqa: E402
from trainer.model.learner import Learner  # noqa: E402

SIBLINGS, GROUPS, LR = 8, 4, 1e-6
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Groups = list[list[TrainRow]]


def made_model(folder: Path, options: argparse.Namespace) -> Path:
    heads = max(2, options.hidden // 32)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    state = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Words:
    """Rows of random tokens, numbered."""

    def __init__(self, vocabulary: int) -> None:
        self._draw, self._vocabulary, self._rows = random.Random(0), vocabulary, 0

    def some(self, count: int) -> list[int]:
        return [self._draw.randrange(2, self._vocabulary) for _ in range(count)]

    def row(self, prompt: list[int], said: list[int], mask: bytes = b"") -> TrainRow:
        self._rows += 1
        trained = mask.count(1) if mask else len(said)
        advantage = self._draw.gauss(0, 1)
        return TrainRow(
            self._rows, pack_tokens(prompt), pack_tokens(said), bytes(4 * trained), advantage, mask=mask
        )

    def groups(self, prompt: int, completion: int) -> Groups:
        found = []
        for _ in range(GROUPS):
            asked = self.some(prompt)
            lengths = [max(1, int(completion * self._draw.lognormvariate(0, 0.6))) for _ in range(SIBLINGS)]
            found.append([self.row(asked, self.some(length)) for length in lengths])
        return found

    def episodes(self, prompt: int, turn: int, tool: int, turns: int = 4) -> Groups:
        """Each episode has one line of turns and, after each turn but the last, a branch that rewrites what follows. A branch trains what
        comes after the others' turns."""
        found = []
        for _ in range(GROUPS):
            rows, asked = [], self.some(prompt)
            for _ in range(2):
                line: list[int] = []
                mask: list[int] = []
                for number in range(turns):
                    if number:
                        other = self.some(tool) + self.some(turn)
                        rows.append(
                            self.row(asked, line + other, bytes([0] * (len(line) + tool) + [1] * turn))
                        )
                        line, mask = line + self.some(tool), mask + [0] * tool
                    line, mask = line + self.some(turn), mask + [1] * turn
                rows.append(self.row(asked, line, bytes(mask)))
            found.append(rows)
        return found


class Side:
    """The product's learner on one rank, fed as `trainer.loop.step` feeds it."""

    def __init__(self, folder: Path, mesh: DeviceMesh, budget: int, *, shares: bool) -> None:
        self._budget, self._plan = budget, prefixes.balanced if shares else batching.balanced
        self._learner = Learner(
            folder,
            mesh,
            recipe=resolve(AlgorithmSection(name="dapo", dynamic_sampling=False, importance="off"), 4096),
            optimizer=OptimizerSection(lr=LR, clip_norm=1e9),
            temperature=1.0,
            deterministic=False,
            trainer=TrainerSection(micro_batch_tokens=budget, share_prefixes=shares),
        )

    def computed(self, groups: Groups) -> int:
        return sum(micro.computed_tokens for (micro,) in self._plan(groups, budget=self._budget, ranks=1))

    def _train(self, groups: Groups) -> None:
        for (micro,) in self._plan(groups, budget=self._budget, ranks=1):
            self._learner.train(micro)

    def gradients(self, groups: Groups) -> list[torch.Tensor]:
        self._train(groups)
        found = [p.grad.full_tensor().double() for p in self._learner.model.parameters()]
        self._learner.discard_gradients()
        return found

    def seconds(self, groups: Groups, clock: str) -> float:
        began = CLOCKS[clock]()
        self._train(groups)
        self._learner.update(float(sum(row.trained for group in groups for row in group)), LR)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return CLOCKS[clock]() - began


def apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Of the gradient's norm."""
    gap = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return float((gap / sum(float(b.square().sum()) for b in other)) ** 0.5)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    words, rows = Words(options.vocabulary), []
    cases = {
        "prompt 512, completions 64": words.groups(512, 64),
        "prompt 256, completions 256": words.groups(256, 256),
        "prompt 32, completions 256": words.groups(32, 256),
        "episodes of 4 turns, branching": words.episodes(256, 64, 64),
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, one thread"
    print(
        f"{device}; hidden {options.hidden}, {options.layers} layers, budget {options.budget:,}; {options.clock} seconds"
    )
    with tempfile.TemporaryDirectory() as folder:
        model, mesh = made_model(Path(folder), options), comm.join(comm.Solo())
        sides = [Side(model, mesh, options.budget, shares=shares) for shares in (False, True)]
        for name, groups in cases.items():
            if options.only not in name:
                continue
            tokens = [side.computed(groups) for side in sides]
            gap = apart(sides[1].gradients(groups), sides[0].gradients(groups))
            pairs = [[side.seconds(groups, options.clock) for side in sides] for _ in range(options.repeats)]
            times = [list(one) for one in zip(*pairs, strict=True)]
            ratios = [without / with_ for without, with_ in pairs]
            rows.append({"case": name, "tokens": tokens, "gap": gap, "seconds": times, "ratios": ratios})
            print(
                f"{name:31} tokens {tokens[0]:7,} -> {tokens[1]:7,}   s/step {spread(times[0])} -> {spread(times[1])}   "
                f"without/with {spread(ratios)}   gradients apart {gap:.1e}",
                flush=True,
            )
        comm.disconnect()
    if options.json:
        options.json.write_text(
            json.dumps({"device": device, "clock": options.clock, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
