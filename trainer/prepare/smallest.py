"""The smallest run: `scavenger init FOLDER --tiny`. Its model is made in place, in a second; its task and reward are built in.

A newcomer sees a whole run on the own site within minutes, before a model or data are chosen: the daemon, harvested engines, the training
job. For a user's own prompts (`--tiny --data`) it makes the model alone. Nothing is learnt before: the weights are random, and the reward
gives a part for each right digit, so that there is something to learn from. Owns the text of this run.toml and the models' size.

Boundary: torch, which the other drafts do without; IO.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from trainer import tiny
from trainer.tasks import sort

HIDDEN, LAYERS = 64, 2
STEPS = 30
#: A prompt, a completion, and a little more.
CONTEXT_TOKENS = 2 * sort.DIGITS + 4


def make_model(folder: Path) -> int:
    """A Qwen3 of random weights with its tokenizer, as a Hugging Face folder. Returns how many parameters it has."""
    model = tiny.initialised(folder, tiny.model_config(HIDDEN, LAYERS))
    return tiny.save(model, folder)


#: What ends and pads a completion of text, and the room for one beside the prompts.
TEXT_EOS, TEXT_COMPLETION = "<eos>", 64


def make_text_model(folder: Path, longest: int) -> int:
    """As `make_model`, for a user's own prompts: a token a byte, so it reads and writes any text. It knows nothing.

    `longest`: bytes of the longest prompt that was seen.
    """
    made = byte_tokenizer()
    eos = made.token_to_id(TEXT_EOS)
    config = tiny.model_config(HIDDEN, LAYERS) | {
        "vocab_size": made.get_vocab_size(),
        "max_position_embeddings": -(-(2 * longest + 2 * TEXT_COMPLETION) // 64) * 64,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    model = tiny.initialised(folder, config)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TEXT_EOS, "pad_token": TEXT_EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tiny.save(model, folder)


def byte_tokenizer() -> Tokenizer:
    """256 bytes and the end. Any text is its own again after encoding and decoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([TEXT_EOS])
    return made


def run_toml(name: str, state_dir: str) -> str:
    """`state_dir`: where the daemon is found; "" = not known, which the file then says. Pure."""
    where = (
        f"state_dir = {json.dumps(state_dir, ensure_ascii=False)}"
        if state_dir
        else 'state_dir = "state"                 # SET THIS: the site\'s public folder (scavenger join); ask its admin'
    )
    return f"""# {name}: the smallest run. A model of random weights learns where the digits of a sorted number are.
# The reward is the share of digits that are right. docs/site.md says what comes next.

[run]
name = {json.dumps(name)}
seed = 1
steps = {STEPS}
{where}
out_dir = "out"
max_engines = 2

[model]
path = "model"                      # made by `scavenger init --tiny`
context_length = {CONTEXT_TOKENS}

[data]
task = "sort"                       # built in: "305712>" is answered by "012357"
prompts_per_step = 32
samples_per_prompt = 8

[sampling]
max_tokens = {sort.DIGITS + 1}

[engine]
name = "reference"                  # runs on GPUs and on CPUs
max_batch = 64

[reward]
function = "trainer.tasks.sort:closeness"

[optimizer]
lr = 5e-3
warmup_steps = 2

[reserved]
workers = 1
wake_after_s = 2.0

[checkpoint]
every = 10
keep = 1

[eval]
every = 0

[weights]
dtype = "float32"
"""
