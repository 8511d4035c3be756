"""Loading a model's shards against every rank loading all of it, and publishing them against gathering: host memory and time, in pairs.

    python benchmarks/load.py [--ranks 4] [--hidden 1024] [--layers 4] [--vocabulary 32000] [--repeats 3] [--json FILE]

Makes a Llama in bfloat16 and loads it into float32 masters over gloo ranks of this machine. Before: each rank reads the whole model and
keeps its shard (`trainer.model.learner.load_model`, then FSDP2). After: `trainer.model.sharded_load`. Memory is the sum over ranks of the
peak that /proc says beyond what each had before, over the sum of what they keep; pages of the weight files count while they are mapped.
The files are in the page cache in both.

Then they make a version in bfloat16 of what they train. Before: tensors are gathered, one after another, to rank 0, which has the version.
After: each rank copies and hashes its own share (`trainer.loop.publish`). Memory is the most that one rank takes over a rank's share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]

import torch  # noqa: E402  after the path, as all that follows
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from benchmarks.many import spread  # noqa: E402

PROGRAM = HERE.parent / "tests/trainer/load_program.py"
GOAL = 1.2


def make(folder: Path, hidden: int, layers: int, vocabulary: int) -> int:
    """Returns how many parameters it has."""
    heads = hidden // 64
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    weights = {
        name: torch.full(value.shape, 0.01, dtype=torch.bfloat16) for name, value in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return sum(value.numel() for value in weights.values())


def ran(folder: Path, small: Path, kind: str, ranks: int, what: str = "memory") -> dict[str, float]:
    """One start of the ranks: bytes at the peak and kept, the slowest rank's seconds. A small model comes first: it imports the rest."""
    with tempfile.TemporaryDirectory() as out:
        jobs = [f"{what}-{kind}-small={small}", f"{what}-{kind}={folder}"]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        subprocess.run([sys.executable, str(PROGRAM), str(ranks), out, *jobs], env=environ, check=True)
        each = [json.loads((Path(out) / f"{what}-{kind}-{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "peak": sum(one["peak"] for one in each),
        "most": max(one["peak"] for one in each),
        "kept": sum(one["kept"] for one in each),
        "seconds": max(one["seconds"] for one in each),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, small = Path(scratch) / "model", Path(scratch) / "small"
        make(small, 64, 1, 256)
        parameters = make(folder, options.hidden, options.layers, options.vocabulary)
        runs = [
            {kind: ran(folder, small, kind, options.ranks) for kind in ("whole", "sharded")}
            for _ in range(options.repeats)
        ]
        made = [
            {kind: ran(folder, small, kind, options.ranks, "publish") for kind in ("gathered", "sharded")}
            for _ in range(options.repeats)
        ]
    kept = runs[0]["sharded"]["kept"]
    print(
        f"{parameters / 1e6:.0f} M parameters, {options.ranks} ranks on one host, which keep {kept / 1e6:.0f} MB"
    )
    for name, kind in (("before", "whole"), ("after", "sharded")):
        memory = [run[kind]["peak"] / run[kind]["kept"] for run in runs]
        print(
            f"{name:7} host memory over what is kept {spread(memory)}; seconds {spread([run[kind]['seconds'] for run in runs])}"
        )
    less = [run["whole"]["peak"] / run["sharded"]["peak"] for run in runs]
    faster = [run["whole"]["seconds"] / run["sharded"]["seconds"] for run in runs]
    print(f"before / after: memory {spread(less)}, seconds {spread(faster)}")
    reached = statistics.median(run["sharded"]["peak"] / run["sharded"]["kept"] for run in runs)
    print(f"goal {GOAL}: {'met' if reached <= GOAL else 'MISSED'}")
    share = made[0]["sharded"]["kept"] / options.ranks
    for name, kind in (("before", "gathered"), ("after", "sharded")):
        memory = [run[kind]["most"] / share for run in made]
        seconds = spread([run[kind]["seconds"] for run in made])
        print(
            f"publishing {name:7} the most that a rank takes over its share {spread(memory)}; seconds {seconds}"
        )
    less = [run["gathered"]["most"] / run["sharded"]["most"] for run in made]
    faster = [run["gathered"]["seconds"] / run["sharded"]["seconds"] for run in made]
    print(f"publishing before / after: memory {spread(less)}, seconds {spread(faster)}")
    if options.json:
        options.json.write_text(json.dumps({"loading": runs, "publishing": made}, indent=1))


if __name__ == "__main__":
    main()
