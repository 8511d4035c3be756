"""`python -m trainer.tiny make --out DIR [--task calculator]`: a small decoder that has half learnt a task, as a Hugging Face folder.

A random initialisation answers nothing right, and a policy gradient needs some right answers: a short supervised phase of a fixed
number of steps takes sampled accuracy to about 0.3, where reinforcement learning takes over. Owns the demo's model and nothing of the
run. The same seed on the same machine makes the same weights.

Boundary: a command of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.tasks import calculator, sort

VOCABULARY = 16  # the alphabet, rounded up
EOS_ID = sort.ALPHABET.index(sort.EOS)
PROMPT_TOKENS = sort.DIGITS + 1
COMPLETION_TOKENS = sort.DIGITS + 1  # the end token is sampled too
SUPERVISED_STEPS = 70
#: Of the calculator's task: supervised steps, and of its demonstrations the share that guesses at once, and the share that forgets the
#: last number.
CALCULATOR_STEPS, GUESSES, FORGETS = 250, 0.35, 0.35
#: By task.
STEPS = {"sort": SUPERVISED_STEPS, "calculator": CALCULATOR_STEPS}
#: Demonstrations in the wrong order. Like a pretrained model's, the warmed-up model's habits are mixed; the reward says which is wanted.
DESCENDING_SHARE = 0.5
BATCH, CALCULATOR_BATCH = 256, 32


def model_config(hidden: int = 128, layers: int = 4) -> dict[str, Any]:
    """A Qwen3 config.json of about 0.8M parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": sort.ALPHABET.index(sort.PAD),
        "torch_dtype": "float32",
    }


def encode(text: str) -> list[int]:
    return [sort.ALPHABET.index(char) for char in text]


def supervised_batch(seed: int, step: int, size: int) -> Tensor:
    """[size, PROMPT_TOKENS + ANSWER_TOKENS] token ids: prompt, answer, end; `DESCENDING_SHARE` of the answers in the wrong order."""
    rows = []
    for row in range(size):
        prompt, meta = sort.prompt_task(seed, step * size + row)
        answer = (
            meta["answer"][::-1] if (row + 1) * DESCENDING_SHARE % 1 < DESCENDING_SHARE else meta["answer"]
        )
        rows.append([*encode(prompt), *encode(answer), EOS_ID])
    return torch.tensor(rows)


def demonstrated(number: int, habit: float) -> tuple[list[int], list[bool]]:
    """The tokens of one demonstrated episode of the calculator's task, and which of them the model says. `habit`, in [0, 1), chooses."""
    terms = calculator.task(number, warm_up=True)
    said = calculator.turns_of(terms)
    if habit < GUESSES:
        said = [f"={(sum(terms) + 1 + number) % 97:02d}"]
    elif habit < GUESSES + FORGETS:
        said = [*said[:-2], f"={sum(terms[:-1]):02d}"]
    tokens, mask = [], []
    heard = calculator.prompt(terms)
    for turn, words in enumerate(said, 1):
        for text, mine in ((heard, False), (words, True)):
            tokens += [calculator.ALPHABET.index(char) for char in text]
            mask += [mine] * len(text)
        tokens.append(EOS_ID)
        mask.append(True)
        reply = calculator.replied(terms, turn, words)
        heard = reply.text if isinstance(reply, calculator.Observation) else ""
    return tokens, mask


def calculator_batch(seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
    """[size, longest] token ids, padded, and which of them are the model's."""
    rows = [demonstrated(seed * 10_000_019 + step * size + row, row / size) for row in range(size)]
    longest = max(len(tokens) for tokens, _ in rows)
    pad = sort.ALPHABET.index(sort.PAD)
    tokens = torch.tensor([[*one, *[pad] * (longest - len(one))] for one, _ in rows])
    return tokens, torch.tensor([[*mask, *[False] * (longest - len(mask))] for _, mask in rows])


@torch.no_grad()
def accuracy(
    model: Any, prompts: int, *, greedy: bool, seed: int = 0, max_tokens: int = COMPLETION_TOKENS + 1
) -> float:
    """Share of held-out prompts completed right, by plain decoding without a cache."""
    drawn = [sort.prompt_task(0, index, held_out=True) for index in range(prompts)]
    tokens = torch.tensor([encode(prompt) for prompt, _ in drawn])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_tokens):
        logits = model(input_ids=tokens).logits[:, -1].float()
        chosen = (
            logits.argmax(-1, keepdim=True)
            if greedy
            else torch.multinomial(logits.softmax(-1), 1, generator=generator)
        )
        tokens = torch.cat([tokens, chosen], dim=1)
    right = 0
    for (_, meta), answer in zip(drawn, tokens[:, PROMPT_TOKENS:].tolist(), strict=True):
        text = "".join(sort.ALPHABET[t] if t < len(sort.ALPHABET) else "?" for t in answer)
        right += text.split(sort.EOS)[0] == meta["answer"]
    return right / prompts


def warm_up(model: Any, seed: int, steps: int, *, lr: float = 3e-3, task: str = "sort") -> None:
    """Supervised steps on training prompts; prints progress."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        if task == "sort":
            batch = supervised_batch(seed, step, BATCH)
            logits = model(input_ids=batch[:, :-1]).logits[:, PROMPT_TOKENS - 1 :].reshape(-1, VOCABULARY)
            wanted = batch[:, PROMPT_TOKENS:].reshape(-1)
        else:
            batch, said = calculator_batch(seed, step, CALCULATOR_BATCH)
            logits, wanted = model(input_ids=batch[:, :-1]).logits[said[:, 1:]], batch[:, 1:][said[:, 1:]]
        loss = functional.cross_entropy(logits, wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f"warm-up {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)


def initialised(out: Path, config: dict[str, Any], seed: int = 0, task: str = "sort") -> Any:
    """A model of random weights, as `config` has it. Writes config.json and the tokenizer to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (sort if task == "sort" else calculator).write_tokenizer(out)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(out, local_files_only=True), dtype=torch.float32
    )


def save(model: Any, out: Path) -> int:
    """Write model.safetensors to `out`. Returns how many parameters it has."""
    parameters = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(parameters, out / "model.safetensors", metadata={"format": "pt"})
    return sum(value.numel() for value in parameters.values())


def make(out: Path, seed: int = 0, steps: int | None = None, task: str = "sort") -> None:
    """Write config.json, model.safetensors and the tokenizer to `out`. `steps`: supervised; None: as many as the task needs."""
    started = time.monotonic()
    model = initialised(out, model_config(), seed, task)
    warm_up(model, seed, STEPS[task] if steps is None else steps, task=task)
    count = save(model, out)
    if task != "sort":  # its accuracy is that of whole episodes: the run measures it
        print(f"{out}: {count / 1e6:.2f}M parameters, {time.monotonic() - started:.1f} s", flush=True)
        return
    sampled, greedy = accuracy(model, 512, greedy=False), accuracy(model, 512, greedy=True)
    print(
        f"{out}: {count / 1e6:.2f}M parameters, held-out accuracy {sampled:.2f} sampled, {greedy:.2f} greedy, "
        f"{time.monotonic() - started:.1f} s",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tiny", description=__doc__.split("\n")[0] if __doc__ else None
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make the demo's model")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--steps", type=int, help="supervised steps")
    making.add_argument("--task", choices=sorted(STEPS), default="sort", help="what it half learns")
    options = parser.parse_args(argv)
    make(options.out, options.seed, options.steps, options.task)
    return 0


if __name__ == "__main__":
    sys.exit(main())
