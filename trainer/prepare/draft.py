"""The text of a new run's `run.toml` and `train.sbatch`, commented. Pure: facts in, text out.

Owns the choices that a first run gets. Every key's meaning and the rest of them: docs/config.md.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from scavenger.sizing import shape as shapes
from scavenger.sizing.shape import ModelShape
from trainer.prepare import sizes
from trainer.prepare.model import ModelFacts
from trainer.prepare.rows import DataFacts
from trainer.prepare.sizes import Sizes, SizingRequest

SHIPPED = "scripts/train.sbatch"
#: Of a completion, where the model's own limit allows it: a first run should not cut what reasoning needs.
COMPLETION_TOKENS = 8192
#: Of a completion of a model of random weights, which ends where it is cut: by chance, and late. Without answers so many; with answers so
#: many more than the longest, for what a verifier wants around it (`\boxed{}`) and the end.
TINY_COMPLETION_TOKENS, TINY_MORE_TOKENS = 16, 10
#: `data.renderer` of the model that `--tiny --environment` makes.
TINY_RENDERER = "qwen3"
#: Of an environment's conversation, beside its last completion.
CONVERSATION_TOKENS = 6144
STEPS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, LEARNING_RATE = 300, 64, 8, "1e-6"
#: Of a model too small to have learnt anything before: fewer parameters than `TOY`. At 1e-6 it would not move within a run.
TOY, TOY_LEARNING_RATE = 10_000_000, "5e-3"
WAKE_AFTER_S = 30.0
DAYS = 2
MATH, EXACT = "trainer.verifiers:math", "trainer.verifiers:exact"
#: An answer that a model can be asked to say alone: a word or a number.
BARE_ANSWER = re.compile(r"[\w.,+-]{1,64}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user said. `gpus`: of each node, 0 = none. `state_dir`: "" = not known. `longest`: tokens of the longest prompt seen.
    `gpu_source`: who said how much memory a GPU has; "" = none, it is assumed. `math_verify`: whether this Python has that package.
    `memory_gib`: of a node's host memory to ask for, 0 = not known. `node_gb`: what a training node has, 0 = not known; `node_source`: who
    said so. `completion`: tokens of a completion at most. `no_sandbox`: why agents' programs cannot be in sandboxes on this machine;
    "" = they can.
    """

    name: str
    folder: Path
    gpus: int
    nodes: int
    gpu_gb: float
    partition: str
    state_dir: str
    reward: str
    engine: str
    python: str
    train_script: Path
    longest: int
    gpu_source: str = ""
    math_verify: bool = True
    memory_gib: int = 0
    node_gb: float = 0.0
    node_source: str = ""
    completion: int = COMPLETION_TOKENS
    no_sandbox: str = ""


def shape_of(model: ModelFacts) -> ModelShape:
    """By config.json, and the weights that the files hold."""
    return replace(shapes.of_config(model.config, model.parameters), vocabulary=model.vocabulary)


def tiny_completion(data: DataFacts) -> int:
    """Tokens of a completion of a model of random weights, which has a token a byte: a little over the first rows' longest answer."""
    answers = [row.get(data.answer_field) for row in data.rows] if data.answer_field else []
    longest = max((len(str(one).encode()) for one in answers if one is not None), default=0)
    return min(COMPLETION_TOKENS, longest + TINY_MORE_TOKENS if longest else TINY_COMPLETION_TOKENS)


def lengths(context: int, longest: int, most: int = COMPLETION_TOKENS) -> tuple[int, int]:
    """model.context_length and sampling.max_tokens: room for the prompts and a chat template around them, within the model's context.

    `most`: tokens of a completion, where the context allows them.
    """
    prompt_tokens = -(-(longest * 5 // 4 + 64) // 64) * 64
    if not context:
        return prompt_tokens + most, most
    kept = min(prompt_tokens, context // 2) if longest <= context // 2 else longest + 1
    completion_tokens = max(1, min(most, context - kept))
    return min(context, prompt_tokens + completion_tokens), completion_tokens


def length_reason(limit: int, context: int, completion_tokens: int, most: int = COMPLETION_TOKENS) -> str:
    """Why completions are cut where they are: as a first run has it, or by the model's own `limit` (0 = it names none)."""
    if most != COMPLETION_TOKENS and completion_tokens == most:
        return "little more than your longest answer, if there are answers: random weights seldom end a completion"
    if completion_tokens == COMPLETION_TOKENS or not limit:
        return "of a completion at most; what is longer is cut"
    return f"the model's own limit of {limit} less {context - completion_tokens} for prompts"


def learning_rate(model: ModelFacts) -> str:
    return TOY_LEARNING_RATE if model.parameters < TOY else LEARNING_RATE


def sizes_of(model: ModelFacts, wish: RunOptions) -> Sizes:
    context, completion_tokens = lengths(model.context, wish.longest, wish.completion)
    samples = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
    return sizes.choose(
        SizingRequest(
            shape_of(model),
            wish.engine,
            wish.gpus,
            wish.nodes,
            wish.gpu_gb,
            context - completion_tokens,
            completion_tokens,
            context,
            samples,
            wish.node_gb,
        )
    )


def run_toml(model: ModelFacts, data: DataFacts, wish: RunOptions) -> str:
    context, completion_tokens = lengths(model.context, wish.longest, wish.completion)
    chosen = sizes_of(model, wish)
    sections = [
        _head(model, data, wish),
        _run(wish, chosen),
        _model(model, context),
        _data(model, data, wish),
        _sampling(model, context, completion_tokens, wish.completion),
        _engine(wish, chosen),
        _reward(model, data, wish),
        _training(data, chosen, learning_rate(model)),
    ]
    return "\n".join(sections)


def assumed(model: ModelFacts, data: DataFacts, wish: RunOptions, given: frozenset[str]) -> list[str]:
    """What the two files take for granted, by file, with the option or key that says otherwise. `given`: the options that were given."""
    chosen, (context, completion_tokens) = (
        sizes_of(model, wish),
        lengths(model.context, wish.longest, wish.completion),
    )
    many = "" if wish.nodes == 1 else "s"
    learning = (
        f"{STEPS} steps of {PROMPTS_PER_STEP} x {SAMPLES_PER_PROMPT} completions, lr {learning_rate(model)}"
    )
    rows = [
        (
            "--partition",
            "train.sbatch",
            f"--partition={wish.partition}",
            "reserved GPUs, which no job preempts (init --partition)",
        ),
        (
            "--gpus",
            "train.sbatch",
            f"{wish.gpus} GPUs a node on {wish.nodes} node{many}",
            "init --gpus, --nodes",
        ),
        (
            "--gpu-memory-gb",
            "train.sbatch",
            f"{wish.gpu_gb:g} GB of memory a GPU",
            wish.gpu_source or "init --gpu TYPE or --gpu-memory-gb",
        ),
        (
            "--node-memory-gb",
            "train.sbatch",
            f"{wish.node_gb or sizes.node_gb(wish.gpus, wish.gpu_gb):,.0f} GB of host memory a node; --mem={wish.memory_gib}G",
            wish.node_source or "init --node-memory-gb",
        ),
        (
            "",
            "train.sbatch",
            f"no --account, no --qos, {DAYS} days",
            "Slurm's defaults for you; lines of the file",
        ),
        (
            "--state-dir",
            "run.toml",
            "run.state_dir",
            "NOT KNOWN, must be set: the daemon's (init --state-dir)",
        ),
        ("--engine", "run.toml", f"engine.name = {wish.engine}", _why_engine(wish.engine)),
        ("", "run.toml", f"engine.max_batch = {chosen.max_batch}", "by the KV cache; the file says how"),
        (
            "",
            "scavenger.toml",
            f"harvest.cpus_per_engine = {chosen.cpus}",
            f"at least, for {chosen.why_host}",
        ),
        (
            "",
            "scavenger.toml",
            f"harvest.memory_mb_per_engine = {chosen.memory_mb}",
            "or 0, the GPUs' share of a node: docs/weights.md",
        ),
        (
            "",
            "run.toml",
            f"model.context_length = {context}",
            f"of it sampling.max_tokens = {completion_tokens} for a completion",
        ),
        ("", "run.toml", learning, "run.steps, data.prompts_per_step, .samples_per_prompt, optimizer.lr"),
    ]
    rows[-1:-1] = _assumed_of_rows(model, data, wish)
    named = {"--gpu-memory-gb"} if "--gpu" in given or not wish.gpus else set()
    named |= set() if wish.gpus else {"--node-memory-gb"}
    known = given | ({"--state-dir"} if wish.state_dir else set()) | named
    shown = [row[1:] for row in rows if row[0] not in known]
    pad = max(len(what) for _, what, _ in shown) + 2
    head = "assumed, as nothing was said (change it in the file; docs/config.md):"
    return [head, *(f"  {where:<16}{what:<{pad}}{why}" for where, what, why in shown)]


def _assumed_of_rows(model: ModelFacts, data: DataFacts, wish: RunOptions) -> list[tuple[str, str, str, str]]:
    if data.environment:
        return _assumed_of_environment(data, wish)
    return [
        ("--prompt-field", "run.toml", f"data.prompt_field = {data.prompt_field}", "init --prompt-field"),
        (
            "--answer-field",
            "run.toml",
            f"data.answer_field = {data.answer_field}" if data.answer_field else "rows have no answers",
            "init --answer-field",
        ),
        (
            "--reward",
            "run.toml",
            f"reward.function = {verifier(model, data, wish)}",
            _why_verifier(model, data, wish),
        ),
    ]


def _assumed_of_environment(data: DataFacts, wish: RunOptions) -> list[tuple[str, str, str, str]]:
    named = f"data.environment = {data.environment}"
    if data.is_built_in:
        return [("", "run.toml", named, "built in; it has no settings of its own")]
    boxes = ("data.sandbox = bubblewrap", "agents' programs in boxes: docs/agents.md, sandboxes")
    if wish.no_sandbox:
        boxes = ("no data.sandbox", "agents' programs run as you; the file says why")
    return [("", "run.toml", named, "its own settings: environment_args, renderer"), ("", "run.toml", *boxes)]


def _why_engine(engine: str) -> str:
    if engine != "vllm":
        return "a tiny model without a GPU (init --engine vllm)"
    return "the engine for GPUs (init --engine reference)"


def _s(value: object) -> str:
    """A TOML string."""
    return json.dumps(str(value), ensure_ascii=False)


def _alone(data: DataFacts, wish: RunOptions) -> str:
    if data.environment:
        return (
            "#   docs/environments.md                       how to try it on one machine, without a cluster"
        )
    return f"#   python -m trainer {shlex.quote(str(wish.folder / 'run.toml'))} --local     a try in one process, without a cluster"


def _head(model: ModelFacts, data: DataFacts, wish: RunOptions) -> str:
    what = data.environment or Path(data.path).name
    return f"""# {wish.name}: {model.architecture}, {model.parameters / 1e6:.2f} M parameters, trained on {what}.
# Every key is explained in docs/config.md, the algorithms in docs/algorithms.md; lines that begin with # and a key show further keys.
#   scavenger init {shlex.quote(str(wish.folder))} --check        what would stop it, before any job is submitted
{_alone(data, wish)}
#   sbatch {shlex.quote(str(wish.folder / "train.sbatch"))}
"""


def _run(wish: RunOptions, chosen: Sizes) -> str:
    state = (
        f"state_dir = {_s(wish.state_dir)}"
        if wish.state_dir
        else 'state_dir = "state"                 # SET THIS: the site\'s public folder (scavenger join); ask its admin'
    )
    return f"""[run]
name = {_s(wish.name)}
seed = 1
steps = {STEPS}
{state}
out_dir = "out"                     # checkpoints and metrics.jsonl; relative to this file
max_engines = 16                    # harvested engines at most; the daemon's own limit applies too
gpus_per_engine = {chosen.engine_gpus}                 # of each harvested engine{_why_gpus(wish, chosen)}
#harvest = false                    # the same run on the reserved GPUs alone, for a comparison (another name and out_dir)

#[daemon]
#embedded = true                    # for a site that runs no daemon: this run starts its own, see docs/admin.md
"""


def _model(model: ModelFacts, context: int) -> str:
    most = f"; the model's own limit is {model.context}" if model.context else ""
    return f"""[model]
path = {_s(model.folder)}
context_length = {context}          # prompt and completion together{most}
"""


def _environment(data: DataFacts, no_sandbox: str) -> str:
    own = "" if data.is_built_in else f"{_settings(data)}{_sandbox(no_sandbox)}"
    what = "built in" if data.is_built_in else "a task set of verifiers: its tasks, harness and rewards"
    return f"""[data]
environment = {_s(data.environment)}          # {what}; docs/environments.md
{own}environment_workers = 1             # processes on rank 0's host
episode_turns = 16                  # model calls of an agent at most
episode_s = 1800.0
on_divergence = "branch"            # where an episode is played again and the environment answers otherwise
prompts_per_step = {PROMPTS_PER_STEP}               # tasks of a step
samples_per_prompt = {SAMPLES_PER_PROMPT}              # episodes of each
"""


def _sandbox(fault: str) -> str:
    """Agents' programs, such as a shell, in boxes; where this machine makes none, the line is a comment that says why."""
    if not fault:
        return 'sandbox = "bubblewrap"              # each agent\'s programs in a box, else they run as you: docs/agents.md\n'
    return (
        f"# Agents' programs, such as a shell, run as you, with your files. No sandbox on the machine of init: {' '.join(fault.split())}.\n"
        '#sandbox = "bubblewrap"             # each agent\'s programs in a box of its own: docs/agents.md\n'
    )


def _settings(data: DataFacts) -> str:
    """Of an environment of `verifiers`."""
    python = (
        f"environment_python = {_s(data.python)}"
        if data.python
        else '#environment_python = "envs/bin/python"   # of a venv with scavenger[verifiers] and the environment\'s package'
    )
    renderer = (
        f"renderer = {{ name = {_s(data.renderer)} }}       # made into tokens as that family's conversations are, with tools"
        if data.renderer
        else '#renderer = { name = "qwen3" }      # how this model\'s conversations become tokens; tools need it'
    )
    return f"""# Its own settings, as its [env] block. Where its agent has another name than `agent`, write that one: init --check tells it.
#environment_args = {{ agent = {{ harness = {{ id = "null" }} }} }}
{python}
{renderer}
"""


def _data(model: ModelFacts, data: DataFacts, wish: RunOptions) -> str:
    if data.environment:
        return _environment(data, wish.no_sandbox)
    chat = bool(model.chat)
    lines = [
        "[data]",
        f"task = {_s(data.task)}",
        f"path = {_s(data.path)}",
        f"prompt_field = {_s(data.prompt_field)}            # of the columns {', '.join(data.columns)}",
        f"answer_field = {_s(data.answer_field)}            # what the reward verifies against"
        if data.answer_field
        else "#answer_field = ...                 # rows have no answers; the reward gets every column by its name",
        f"chat = {'true' if chat else 'false'}                        # "
        + (
            "prompts go through the model's chat template"
            if chat
            else "the model has no chat template: prompts go as they are"
        ),
    ]
    if data.mathematics and chat:
        lines.append('system = "Reason step by step and put the final answer into \\\\boxed{}."')
    if "enable_thinking" in model.chat:
        lines.append(
            "chat_options = { enable_thinking = false }   # true: completions begin with long thoughts; raise sampling.max_tokens"
        )
    lines += [
        'on_overlong = "stop"                # or "drop": prompts that leave no room for a completion are left out, and counted',
        f"prompts_per_step = {PROMPTS_PER_STEP}",
        f"samples_per_prompt = {SAMPLES_PER_PROMPT}",
    ]
    return "\n".join(lines) + "\n"


def _sampling(model: ModelFacts, context: int, completion_tokens: int, most: int) -> str:
    ids = ", ".join(map(str, model.end))
    end = (
        f"#stop_token_ids = [{ids}]          # what ends a completion; this is what {model.end_source} says, and the default"
        if model.end
        else "stop_token_ids = []                 # SET THIS: the model's folder names no eos_token_id"
    )
    return f"""[sampling]
max_tokens = {completion_tokens}                   # {length_reason(model.context, context, completion_tokens, most)}
temperature = 1.0
{end}
"""


def _why_gpus(wish: RunOptions, chosen: Sizes) -> str:
    if wish.engine != "vllm" or not wish.gpus:
        return ""
    return f": the fewest of {wish.gpu_gb:g} GB that hold weights and cache"


def _engine(wish: RunOptions, chosen: Sizes) -> str:
    gpu, why = (
        "",
        '           # for tiny models without a GPU, and tests; "vllm" for all others: docs/engines.md',
    )
    if wish.engine == "vllm":
        gpu = f"gpu_memory_share = {chosen.share:.2f}             # of a GPU's memory; reserved engines share theirs with the trainer\n"
        why = "                       # docs/engines.md"
    batch = "\n".join(chosen.why_batch)
    return f"""[engine]
name = {_s(wish.engine)}{why}
{batch}
max_batch = {chosen.max_batch}
{gpu}# The daemon's scavenger.toml, [harvest], should give each engine's job ({chosen.why_host}):
#   cpus_per_engine = {chosen.cpus}, memory_mb_per_engine = {chosen.memory_mb}
"""


def verifier(model: ModelFacts, data: DataFacts, wish: RunOptions) -> str:
    """Of answers like these, where no function of the user's is named. Where math-verify is not installed, a model that does not chat is
    judged by the letter if its answers are bare words; what a chat model says around its answer takes math-verify.
    """
    return EXACT if not data.mathematics or _by_the_letter(model, data, wish) else MATH


def _by_the_letter(model: ModelFacts, data: DataFacts, wish: RunOptions) -> bool:
    answers = [str(row.get(data.answer_field, "")) for row in data.rows]
    return not (wish.math_verify or model.chat) and all(map(BARE_ANSWER.fullmatch, answers))


def _why_verifier(model: ModelFacts, data: DataFacts, wish: RunOptions) -> str:
    by_the_letter = data.mathematics and _by_the_letter(model, data, wish)
    return "by the letter: no math-verify here (init --reward)" if by_the_letter else "init --reward"


def missing_extra(model: ModelFacts, data: DataFacts, wish: RunOptions) -> str:
    """What is to be installed before the run, and what goes without; "" = nothing."""
    if wish.math_verify or (wish.reward or verifier(model, data, wish)) != MATH:
        return ""
    return (
        f"{MATH} needs math-verify, which {wish.python} has not. Whoever installed that Python adds it: "
        f"pip install 'scavenger[math]'. Without it: --reward {EXACT} (the answer by the letter), or your own function"
    )


def own_reward(data: DataFacts, wish: RunOptions, *, written: bool) -> list[str]:
    """What the function that --reward names receives of these rows, and where its module goes unless it is `written`; [] where it is one
    of the trainer's own. Pure."""
    module, _, function = wish.reward.partition(":")
    if not wish.reward or data.environment or module.partition(".")[0] == "trainer":
        return []
    meta = [repr(name) for name in data.columns if name not in (data.prompt_field, "answer", "row")]
    if data.answer_field:
        same = "" if data.answer_field == "answer" else f" (the column {data.answer_field!r})"
        meta.append(f"'answer'{same}")
    elif "answer" in data.columns:
        meta.append("'answer'")
    meta.append("'row'" if "row" in data.columns else "'row' (the row's number, from 0)")
    said = [
        f"reward: {function or 'the function'}(prompt: str, completion: str, meta: dict) -> float is called for each completion",
        f"  meta has {', '.join(meta)}",
    ]
    if not written:
        path = wish.folder / f"{module.replace('.', '/')}.py"
        said.append(
            f"LOOK: there is no module {module} yet: write it as {path} (docs/rewards.md has an example). init --check calls it as the run "
            "will"
        )
    return said


def _reward(model: ModelFacts, data: DataFacts, wish: RunOptions) -> str:
    if data.environment:
        return """[reward]
retries = 1                         # of an episode whose environment failed
on_reward_error = "stop"            # or "mask": episodes that failed so often are left out, and counted
"""
    if wish.reward:
        chosen, why = (
            wish.reward,
            "f(prompt: str, completion: str, meta: dict) -> float, in a module beside this file or installed",
        )
    elif verifier(model, data, wish) == MATH:
        chosen, why = (
            verifier(model, data, wish),
            f"1 where the answer equals `{data.answer_field}`; or your own module:function",
        )
    else:
        chosen, why = (
            verifier(model, data, wish),
            f"1 where the answer is `{data.answer_field}` by the letter; or your own",
        )
    return f"""[reward]
function = {_s(chosen)}    # {why}
timeout_s = 10.0
retries = 1
on_reward_error = "stop"            # or "mask": completions that cannot be judged are left out, and counted
"""


def _training(data: DataFacts, chosen: Sizes, rate: str) -> str:
    held_out = (
        f"path = {_s(data.held_out)}\n"
        if data.held_out
        else "#path = ...         # held-out rows; else taken out of data.path\n"
        if not data.environment
        else "#                   # above 0: so many tasks are held out\n"
    )
    why = f"{chosen.why_reserved}\n" if chosen.why_reserved else ""
    return f"""[algorithm]
name = "grpo"                       # or dapo, dr_grpo, rloo, gspo, cispo, ...: docs/algorithms.md
#kl_coef = 0.001                    # keeps the starting model in memory too
#on_length = "mask"                 # completions that max_tokens ended are not trained

[optimizer]
lr = {rate}
warmup_steps = 10

[lora]
rank = 0                            # above 0: adapters of that rank are trained, not all weights

[reserved]
{why}workers = {chosen.reserved}                         # engines on the training job's own GPUs: they generate while no GPU is idle
gpus_per_engine = {chosen.reserved_gpus}                 # of each, on one node
wake_after_s = {WAKE_AFTER_S}

[checkpoint]
every = 20
keep = 2

[eval]
every = 50
prompts = {data.eval_prompts}
{held_out}
[trainer]
micro_batch_tokens = {chosen.micro_tokens}
activation_checkpointing = {"true" if chosen.checkpointing else "false"}
"""


def train_sbatch(wish: RunOptions) -> str:
    """A job script that is submitted as it stands. The shipped one does the work; this one says where and how large."""
    gpus = f"#SBATCH --gpus-per-node={wish.gpus}\n" if wish.gpus else ""
    memory = (
        f"# Host memory of a node, as `scavenger init --check` counts it; fewer, larger reserved engines take less.\n"
        f"#SBATCH --mem={wish.memory_gib}G\n"
        if wish.memory_gib
        else ""
    )
    return f"""#!/usr/bin/env bash
# The training job of {wish.name}:   sbatch {shlex.quote(str(wish.folder / "train.sbatch"))} [trainer arguments]
# Reserved GPUs: a partition that is not preempted.
#SBATCH --job-name={wish.name}
#SBATCH --partition={wish.partition}
#SBATCH --nodes={wish.nodes}
# One task (an MPI rank) a GPU.
#SBATCH --ntasks={max(1, wish.gpus * wish.nodes)}
{gpus}{memory}#SBATCH --cpus-per-task=4
#SBATCH --time={DAYS}-00:00:00
# A job that Slurm preempts, or whose node fails, starts again from the newest checkpoint, and so does a second sbatch.
#SBATCH --requeue
# So long before the time limit it writes a checkpoint, and goes back to the queue.
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
# Relative to this folder, where your own reward module is looked for, too.
#SBATCH --chdir="{wish.folder}"
#SBATCH --output=train-%j.log
##SBATCH --account=...
##SBATCH --qos=...
# Read by `scavenger init --check`:
# gpu-memory-gb={wish.gpu_gb:g}
{f"# node-memory-gb={wish.node_gb:.0f}{chr(10)}" if wish.node_gb else ""}set -euo pipefail
# The same path on every node, with scavenger's extra [trainer].
export SCAVENGER_PYTHON=${{SCAVENGER_PYTHON:-{shlex.quote(wish.python)}}}
exec bash {shlex.quote(str(wish.train_script))} {shlex.quote(str(wish.folder / "run.toml"))} "$@"
"""
