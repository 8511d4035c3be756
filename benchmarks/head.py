"""The output head by chunks against the plain one: peak memory and time of forward and backward, in pairs in one run.

    python benchmarks/head.py [--tokens 1024,4096] [--vocabulary 32768] [--hidden 256] [--chunk 1024] [--repeats 3] [--json FILE]

Before: the logits of all tokens, and the softmax over them in pieces (`picked_logprobs`), as `trainer.head_chunk_tokens = 0` still does.
After: `trainer.model.head`. Both get the same hidden states, weight and targets, and make logprobs and gradients. On a CPU every
measurement is a process of its own, whose peak is that of /proc beyond what it had before; on a GPU (bfloat16) it is the allocator's.
Each row: the median of the pairs' ratios with their spread.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# A script's own folder stands first on the path, and there some files would hide packages of their names.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

from trainer.algorithms.loss import picked_logprobs  # noqa: E402
from trainer.model.head import Tail, chunked_logprobs  # noqa: E402


def step(options: argparse.Namespace, tokens: int, chunk: int) -> dict[str, float]:
    """Seconds and bytes beyond the inputs, of one forward and backward pass. `chunk` 0: the plain head."""
    cuda = torch.cuda.is_available()
    kind: dict[str, Any] = (
        {"device": "cuda", "dtype": torch.bfloat16} if cuda else {"device": "cpu", "dtype": torch.float32}
    )
    torch.manual_seed(0)
    hidden = torch.randn(tokens, options.hidden, **kind).requires_grad_()
    weight = torch.randn(options.vocabulary, options.hidden, **kind).mul_(0.02).requires_grad_()
    targets = torch.randint(options.vocabulary, (tokens,), device=kind["device"])
    advantages = torch.randn(tokens, device=kind["device"])
    begin = _mark(cuda)
    started = time.perf_counter()
    if chunk:
        found = chunked_logprobs(
            hidden, weight, None, targets, tail=Tail(), temperature=1.0, chunk=chunk
        ).values
    else:
        found = picked_logprobs(functional.linear(hidden, weight), targets, 1.0)
    (found * advantages).sum().backward()  # type: ignore[no-untyped-call]
    if cuda:
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - started, "nbytes": _peak(cuda) - begin}


def _mark(cuda: bool) -> int:
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    return _status("VmRSS")


def _peak(cuda: bool) -> int:
    return torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _into(pipe: Any, options: argparse.Namespace, tokens: int, chunk: int) -> None:
    torch.set_num_threads(1)
    pipe.send(step(options, tokens, chunk))


def measured(options: argparse.Namespace, tokens: int, chunk: int) -> dict[str, float]:
    if torch.cuda.is_available():
        return step(options, tokens, chunk)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_into, args=(there, options, tokens, chunk))
    process.start()
    found: dict[str, float] = here.recv()
    process.join()
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1024,2048,4096,8192")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, one thread"
    print(
        f"{device}; vocabulary {options.vocabulary:,}, hidden {options.hidden}, chunks of {options.chunk:,} tokens"
    )
    print("tokens    peak before   after      before / after       time after / before")
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        pairs = [
            (measured(options, tokens, 0), measured(options, tokens, options.chunk))
            for _ in range(options.repeats)
        ]
        before, after = (statistics.median(pair[side]["nbytes"] for pair in pairs) for side in (0, 1))
        memory = [one["nbytes"] / other["nbytes"] for one, other in pairs]
        seconds = [other["seconds"] / one["seconds"] for one, other in pairs]
        rows.append({"tokens": tokens, "before": before, "after": after, "memory": memory, "time": seconds})
        print(
            f"{tokens:6,}    {before / 1e6:8.0f} MB   {after / 1e6:6.0f} MB   {spread(memory):20} {spread(seconds)}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
