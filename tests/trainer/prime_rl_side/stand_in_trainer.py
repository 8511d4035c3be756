"""What stands for prime-rl's trainer where there is no GPU: REINFORCE on its batches, and its folders of weights. In prime-rl's Python.

    python stand_in_trainer.py MODEL OUTPUT_DIR STEPS REPORT

Batches are read by prime-rl's own receiver. Weights go where its filesystem broadcast puts them: `broadcasts/step_N/model.safetensors`,
then `STABLE`; those after the last step are not broadcast, as with prime-rl. REPORT gets a line of JSON for each step: samples, how far
the inference logprobs are from those of this model, the version that step trained from, and the reward's sign of life.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchReceiver
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def broadcast(model: torch.nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True)
    found = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    (folder / "STABLE").touch()


def logprobs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    ids = torch.tensor([tokens])
    told = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return told.gather(-1, ids[0, 1:, None])[:, 0]


def main() -> None:
    path, output_dir, steps, report = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    broadcast(model, output_dir / "broadcasts" / "step_0")
    receiver = FileSystemMicroBatchReceiver(output_dir, 0, 1)
    for step in range(1, steps + 1):
        receiver.wait()
        loss, trained, furthest, samples = torch.zeros(()), 0, 0.0, []
        for batch in receiver.receive():
            begin = 0
            for length in batch.sequence_lengths:
                end = begin + length
                mask = torch.tensor(batch.loss_mask[begin + 1 : end])
                if mask.any():
                    mine = logprobs(model, batch.input_ids[begin:end])
                    theirs = torch.tensor(batch.inference_logprobs[begin + 1 : end])
                    gain = torch.tensor(batch.advantages[begin + 1 : end])
                    furthest = max(furthest, float((mine.detach() - theirs)[mask].abs().max()))
                    loss = loss - (gain * mine)[mask].sum()
                    trained += int(mask.sum())
                    samples.append(batch.input_ids[begin:end])
                begin = end
        optimizer.zero_grad()
        (loss / trained).backward()
        optimizer.step()
        if step < steps:
            broadcast(model, output_dir / "broadcasts" / f"step_{step}")
        with report.open("a") as file:
            file.write(json.dumps({"step": step, "furthest": furthest, "samples": samples}) + "\n")


if __name__ == "__main__":
    main()
