"""The smallest run: `scavenger init FOLDER --tiny`. Its model is made in place, in a second; its task and reward are built in.

A newcomer sees a whole run on the own site within minutes, before a model or data are chosen: the daemon, harvested engines, the training
job. For a user's own prompts (`--tiny --data`) or an environment (`--tiny --environment`) it makes the model alone. Nothing is learnt
before: the weights are random, and the reward gives a part for each right digit, so that there is something to learn from. Owns the text
of this run.toml and the models' size.

Boundary: torch, which the other drafts do without; IO.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
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
    made.add_special_tokens([TEXT_EOS])
    return _save(folder, made, TEXT_EOS, -(-(2 * longest + 2 * TEXT_COMPLETION) // 64) * 64)


#: Tokens that Qwen3's conversations are made of, whose renderer knows tools: what ends a turn is the first.
CHAT_SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
CHAT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
#: Room for a harness's own prompt and tools, a token a byte, and some turns.
CHAT_POSITIONS = 16_384
#: What it says, one token each. A harness that has it as text and strips it gives back the same tokens; random bytes are no text.
CHAT_SAID = string.ascii_letters + string.digits + string.punctuation
#: Of every token's embedding the first channel, which the last norm makes some 8 of, and what the other tokens' logits have of it.
MARK, UNSAID = 1.0, -4.0
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_chat_model(folder: Path) -> int:
    """As `make_text_model`, for an environment: with a chat template, tokens of tools, and room for a conversation."""
    made = byte_tokenizer()
    made.add_special_tokens(list(CHAT_SPECIAL))
    made.add_tokens(list(CHAT_TOKENS))
    vocabulary = made.get_vocab()
    said = [vocabulary[sign] for sign in (*CHAT_SAID, CHAT_SPECIAL[0])]
    return _save(folder, made, CHAT_SPECIAL[0], CHAT_POSITIONS, {"chat_template": CHAT_TEMPLATE}, said)


def _save(
    folder: Path,
    made: Tokenizer,
    eos: str,
    positions: int,
    more: Mapping[str, str] | None = None,
    said: Sequence[int] = (),
) -> int:
    """`more`: of tokenizer_config.json. `said`: the tokens that the model says; none = any."""
    config = tiny.model_config(HIDDEN, LAYERS) | {
        "vocab_size": made.get_vocab_size(),
        "max_position_embeddings": positions,
        "eos_token_id": made.token_to_id(eos),
        "pad_token_id": made.token_to_id(eos),
        "tie_word_embeddings": not said,
    }
    model = tiny.initialised(folder, config)
    if said:
        _say_only(model, said)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": eos,
        **(more or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tiny.save(model, folder)


@torch.no_grad()
def _say_only(model: Any, said: Sequence[int]) -> None:
    """Let the other tokens be so improbable that they are never drawn. A bias would say so; Qwen3's head has none, so that a channel which
    is alike for whatever was read has its part.
    """
    model.get_input_embeddings().weight[:, 0] = MARK
    head = model.get_output_embeddings().weight
    head[:, 0] = UNSAID
    head[list(said), 0] = 0.0


def byte_tokenizer() -> Tokenizer:
    """256 bytes. Any text is its own again after encoding and decoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
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
