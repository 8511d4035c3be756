"""`python -m trainer.prepare draft FOLDER --model PATH|--tiny --data PATH`, `… tiny FOLDER`, `… check FOLDER` and `… host FOLDER`: what
`scavenger init` starts.

Owns arguments, reading, writing and exit codes: 0 done, 2 refused. Existing files are left unless --force. `host` prints what the daemon
should give the job of a drafted run's engine: keys of [harvest] as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from scavenger import resources
from scavenger.config import read_run
from scavenger.errors import ConfigError, ScavengerError
from scavenger.sizing import engine as engine_sizes
from scavenger.sizing.training import GB
from trainer.arguments import add_layers
from trainer.data.prompts import open_tokenizer
from trainer.prepare import check, draft, model, rows, sizes
from trainer.prepare.draft import RunOptions
from trainer.prepare.rows import DataFacts

#: Of a GPU of which nothing is known.
ASSUMED_GPU_GB = 80.0
#: What a first reward of such a model has to cope with.
RANDOM_WEIGHTS = (
    'A model of random weights says random bytes first. Give credit in parts (`return {"letters": ..., "right": ...}`) and set '
    "sampling.max_tokens to little more than your longest answer."
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scavenger init", description="A run's files, and what would stop it."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drafting = commands.add_parser("draft")
    drafting.add_argument("folder", type=Path)
    drafting.add_argument("--model", type=Path)
    drafting.add_argument("--tiny", action="store_true", help="make the model, in FOLDER/model")
    drafting.add_argument("--data", type=Path)
    for name in (
        "--environment",
        "--environment-python",
        "--prompt-field",
        "--answer-field",
        "--reward",
        "--state-dir",
        "--engine",
        "--gpu",
        "--slurm-gpu",
    ):
        drafting.add_argument(name, default="")
    drafting.add_argument("--partition", default="reserved")
    for name, default in (
        ("--gpus", 8),
        ("--nodes", 1),
        ("--gpu-memory-gb", 0.0),
        ("--node-memory-gb", 0.0),
        ("--slurm-memory-mb", 0),
    ):
        drafting.add_argument(name, type=type(default), default=default)
    drafting.add_argument("--force", action="store_true")
    smallest = commands.add_parser("tiny")
    smallest.add_argument("folder", type=Path)
    smallest.add_argument("--state-dir", default="")
    smallest.add_argument("--partition", default="reserved")
    smallest.add_argument("--gpus", type=int, default=1)
    smallest.add_argument("--force", action="store_true")
    checking = commands.add_parser("check")
    checking.add_argument("folder", type=Path)
    checking.add_argument("--gpu-memory-gb", type=float, default=0.0)
    add_layers(checking)
    commands.add_parser("host").add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    options.given = frozenset(argument.partition("=")[0] for argument in argv if argument.startswith("--"))
    # What they are written into counts paths from its own folder.
    for name in ("environment_python", "state_dir"):
        if text := getattr(options, name, ""):
            setattr(options, name, str(_whole(Path(text))))
    return options


def longest_prompt(folder: Path, data: DataFacts) -> int:
    """Tokens of the longest prompt among the first rows, without its template; of an environment a guess. Raises `ConfigError`."""
    if data.environment:
        return draft.CONVERSATION_TOKENS
    found = open_tokenizer(folder).encode_batch(_texts(data), add_special_tokens=False)
    return max(len(one.ids) for one in found)


def _texts(data: DataFacts) -> list[str]:
    """Of the prompts of the first rows."""
    prompts = [row.get(data.prompt_field) for row in data.rows]
    return [
        prompt
        if isinstance(prompt, str)
        else "\n".join(str(turn.get("content", "")) for turn in prompt or () if isinstance(turn, dict))
        for prompt in prompts
    ]


def gpu_memory(options: argparse.Namespace) -> tuple[float, str]:
    """Gigabytes of a GPU, and the source of that number, "" for none. Raises `ConfigError` for a type that is not known and was named."""
    if options.gpu_memory_gb:
        return options.gpu_memory_gb, "as --gpu-memory-gb says"
    if options.gpu:
        found = engine_sizes.gpu_gb(options.gpu)
        if not found:
            known = ", ".join(sorted(name for name, _ in engine_sizes.GPU_GB))
            raise ConfigError(
                f"--gpu {options.gpu}: not a type whose memory is known",
                f"say --gpu-memory-gb N, or one of {known}",
            )
        return found, f"as a {options.gpu} has"
    found = min((gb for gb in map(engine_sizes.gpu_gb, options.slurm_gpu.split(",")) if gb), default=0.0)
    return (found, f"a {options.slurm_gpu}, as Slurm names its GPUs there") if found else (ASSUMED_GPU_GB, "")


def node_memory(options: argparse.Namespace) -> tuple[float, str]:
    """Gigabytes of a training node's host memory, and the source of that number; 0 and "" where nobody said."""
    if options.node_memory_gb:
        return options.node_memory_gb, "as --node-memory-gb says"
    gb = options.slurm_memory_mb * (1 << 20) / GB
    return (gb, "the smallest node of that partition, as Slurm says") if gb else (0.0, "")


def _folder(options: argparse.Namespace) -> Path:
    """Where the files go. Raises `ConfigError` for a name that no run can have, and for files that are there."""
    folder: Path = options.folder.resolve()
    if not NAME.fullmatch(folder.name) or any(sign in str(folder) for sign in '"\n%\\'):
        raise ConfigError(
            f"{folder} cannot name a run", "letters, digits, dot, dash and underscore, 64 at most"
        )
    existing = [path for path in (folder / "run.toml", folder / "train.sbatch") if path.exists()]
    if existing and not options.force:
        raise ConfigError(
            f"{' and '.join(map(str, existing))} exist already",
            "choose another name, or overwrite them with --force",
        )
    return folder


def write_smallest(options: argparse.Namespace) -> None:
    """The smallest run with its model. Raises `ConfigError`."""
    folder = _folder(options)
    from trainer.prepare import smallest  # torch: seconds of imports

    wish = RunOptions(
        folder.name,
        folder,
        options.gpus,
        1,
        ASSUMED_GPU_GB,
        options.partition,
        options.state_dir,
        "",
        "reference",
        sys.executable,
        resources.path(draft.SHIPPED),
        0,
    )
    count = smallest.make_model(folder / "model")
    print(f"wrote {folder / 'model'}: {count / 1e6:.2f} M parameters, random")
    for name, text in (
        ("run.toml", smallest.run_toml(folder.name, options.state_dir)),
        ("train.sbatch", draft.train_sbatch(wish)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")
    print(
        f"it trains in --partition={options.partition} with --gpus-per-node={options.gpus}: lines of train.sbatch"
    )
    if not options.state_dir:
        print("run.state_dir: NOT KNOWN, must be set: the daemon's (init --state-dir)")
    print(
        f"next: scavenger init {options.folder} --check, then sbatch {options.folder / 'train.sbatch'}; "
        f"without a cluster: python -m trainer {options.folder / 'run.toml'} --local"
    )


def write(options: argparse.Namespace) -> None:
    """run.toml and train.sbatch, both or none. Raises `ConfigError`."""
    folder = _folder(options)
    if options.environment:
        renderer = draft.TINY_RENDERER if options.tiny else ""
        data = rows.of_environment(options.environment, options.environment_python, renderer)
    else:
        data = rows.read_facts(_whole(options.data), options.prompt_field, options.answer_field)
    if not (data.answer_field or data.environment or options.reward):
        raise ConfigError(
            f"{data.path}: no column looks like answers, so no reward function can be chosen; there is "
            f"{', '.join(map(repr, data.columns))}",
            "say what rewards completions: --reward MODULE:FUNCTION (trainer.judge:reward for a judge model), or name the answers' "
            "column: --answer-field NAME",
        )
    if options.engine not in ("", "vllm", "reference"):
        raise ConfigError(f"--engine {options.engine}: there is no such engine", "say vllm or reference")
    if options.tiny:
        options.model = _text_model(folder / "model", data)
    facts = model.read_facts(options.model.resolve())
    engine = options.engine or sizes.engine_for(facts.parameters, options.gpus)
    gpu_gb, gpu_source = gpu_memory(options)
    wish = RunOptions(
        folder.name,
        folder,
        options.gpus,
        options.nodes,
        gpu_gb,
        options.partition,
        options.state_dir,
        options.reward,
        engine,
        sys.executable,
        resources.path(draft.SHIPPED),
        longest_prompt(facts.folder, data),
        gpu_source,
        importlib.util.find_spec("math_verify") is not None,
        0,
        *node_memory(options),
        draft.tiny_completion(data) if options.tiny else draft.COMPLETION_TOKENS,
        _no_sandbox(data),
    )
    folder.mkdir(parents=True, exist_ok=True)
    run, script = folder / "run.toml", folder / "train.sbatch"
    run.write_text(draft.run_toml(facts, data, wish), encoding="utf-8")
    if wish.gpus:
        wish = replace(wish, memory_gib=check.asked_gib(read_run(run), facts, draft.train_sbatch(wish)))
    script.write_text(draft.train_sbatch(wish), encoding="utf-8")
    print(f"wrote {run}\nwrote {script}")
    print(
        f"found: {facts.architecture} ({facts.model_type}), {facts.parameters / 1e6:.2f} M parameters; completions end with "
        f"{', '.join(map(str, facts.end)) or '?'}; {'a' if facts.chat else 'no'} chat template"
        + ("" if data.environment else f"; {_columns(data)}")
    )
    print("\n".join(draft.assumed(facts, data, wish, options.given)))
    if wish.gpus:
        cause, remedy = check.memory_fault(read_run(run), facts, script.read_text(encoding="utf-8"))
        if cause:
            print(f"LOOK: {cause}\n  remedy: {remedy}")
    if missing := draft.missing_extra(facts, data, wish):
        print(f"LOOK: {missing}")
    for line in draft.own_reward(data, wish, written=_is_written(wish.reward, folder)):
        print(line)
    if options.tiny and not data.environment:
        print(RANDOM_WEIGHTS)
    print(
        f"next: look at both files, then scavenger init {options.folder} --check, then sbatch {options.folder / 'train.sbatch'}; "
        + (
            "without a cluster: docs/environments.md, on one machine"
            if data.environment
            else f"without a cluster: python -m trainer {options.folder / 'run.toml'} --local"
        )
    )


def _no_sandbox(data: DataFacts) -> str:
    """Why agents' programs cannot be in sandboxes on this machine; "" = they can, or there are none."""
    if not data.environment or data.is_built_in:
        return ""
    from trainer.sandbox import box

    return box.fault_here()


def _columns(data: DataFacts) -> str:
    answers = f"answers in {data.answer_field!r}" if data.answer_field else "no answers"
    return f"prompts in {data.prompt_field!r}, {answers}"


def _is_written(reward: str, folder: Path) -> bool:
    """Whether the module of a reward function lies in the run's folder, or is installed. It is not imported: that is the run's to do."""
    module = reward.partition(":")[0]
    own, top = folder / module.replace(".", "/"), module.partition(".")[0]
    if own.with_name(own.name + ".py").is_file() or (own / "__init__.py").is_file():
        return True
    found = importlib.util.find_spec(top) if top.isidentifier() else None
    # The folder that `init` was called in is on our path, and not on the run's.
    return found is not None and found.origin is not None and Path.cwd() not in Path(found.origin).parents[:2]


def _text_model(folder: Path, data: DataFacts) -> Path:
    from trainer.prepare import smallest  # torch: seconds of imports

    if data.environment:
        count = smallest.make_chat_model(folder)
    else:
        count = smallest.make_text_model(folder, max(len(text.encode()) for text in _texts(data)))
    print(f"wrote {folder}: {count / 1e6:.2f} M parameters, random; a token a byte")
    return folder


def _whole(path: Path) -> Path:
    """Absolute, without following links: a pattern is no path that could be resolved, and a venv's Python is a link to another one."""
    return path if path.is_absolute() else Path.cwd() / path


def examine(options: argparse.Namespace) -> int:
    folder = options.folder.resolve()
    script = folder / "train.sbatch"
    gpus = check.gpus_of(script.read_text(encoding="utf-8") if script.is_file() else "")
    if options.gpu_memory_gb:
        gpus = replace(gpus, gb=options.gpu_memory_gb)
    found = list(check.check(folder / "run.toml", gpus, options.over, options.set))
    lines, fine = check.report(folder / "run.toml", found)
    print("\n".join(lines))
    return 0 if fine else ConfigError.exit_code


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        if options.command == "check":
            return examine(options)
        if options.command == "host":
            print(json.dumps(check.host_of(options.folder.resolve() / "run.toml")))
            return 0
        (write_smallest if options.command == "tiny" else write)(options)
    except ScavengerError as error:
        print(f"scavenger: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
