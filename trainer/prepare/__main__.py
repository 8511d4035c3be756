"""`python -m trainer.prepare draft FOLDER --model PATH --data PATH` and `… check FOLDER`: what `scavenger init` starts.

Owns arguments, reading, writing and exit codes: 0 done, 2 refused. Existing files are left unless --force.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from scavenger import resources
from scavenger.errors import ConfigError, ScavengerError
from trainer.data import open_tokenizer
from trainer.prepare import check, draft, model, rows
from trainer.prepare.draft import Wish
from trainer.prepare.rows import DataFacts

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scavenger init", description="A run's files, and what would stop it.")
    commands = parser.add_subparsers(dest="command", required=True)
    drafting = commands.add_parser("draft")
    drafting.add_argument("folder", type=Path)
    drafting.add_argument("--model", type=Path, required=True)
    drafting.add_argument("--data", type=Path, required=True)
    for name in ("--prompt-field", "--answer-field", "--reward", "--state-dir", "--engine"):
        drafting.add_argument(name, default="")
    drafting.add_argument("--partition", default="reserved")
    for name, default in (("--gpus", 8), ("--nodes", 1), ("--gpu-memory-gb", 80.0)):
        drafting.add_argument(name, type=type(default), default=default)
    drafting.add_argument("--force", action="store_true")
    checking = commands.add_parser("check")
    checking.add_argument("folder", type=Path)
    checking.add_argument("--gpu-memory-gb", type=float, default=0.0)
    options = parser.parse_args(argv)
    options.said = frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))
    return options


def longest_prompt(folder: Path, data: DataFacts) -> int:
    """Tokens of the longest prompt among the first rows, without its template. Raises `ConfigError`."""
    tokenizer = open_tokenizer(folder)
    prompts = [row.get(data.prompt_field) for row in data.rows]
    texts = [
        prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content", "")) for turn in prompt or () if isinstance(turn, dict))
        for prompt in prompts
    ]
    return max(len(found.ids) for found in tokenizer.encode_batch(texts, add_special_tokens=False))


def write(options: argparse.Namespace) -> None:
    """run.toml and train.sbatch, both or none. Raises `ConfigError`."""
    folder = options.folder.resolve()
    if not NAME.fullmatch(folder.name) or any(sign in str(folder) for sign in '"\n%\\'):
        raise ConfigError(f"{folder} cannot name a run", "letters, digits, dot, dash and underscore, 64 at most")
    existing = [path for path in (folder / "run.toml", folder / "train.sbatch") if path.exists()]
    if existing and not options.force:
        raise ConfigError(f"{' and '.join(map(str, existing))} exist already", "choose another name, or overwrite them with --force")
    facts = model.look(options.model.resolve())
    data = rows.look(_whole(options.data), options.prompt_field, options.answer_field)
    engine = options.engine or ("vllm" if importlib.util.find_spec("vllm") else "reference")
    wish = Wish(
        folder.name, folder, options.gpus, options.nodes, options.gpu_memory_gb, options.partition, options.state_dir, options.reward,
        engine, sys.executable, resources.path(draft.SHIPPED), longest_prompt(facts.folder, data),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("run.toml", draft.run_toml(facts, data, wish)), ("train.sbatch", draft.train_sbatch(wish))):
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")
    print(
        f"found: {facts.architecture} ({facts.model_type}), {facts.parameters / 1e6:.2f} M parameters; answers end with "
        f"{', '.join(map(str, facts.end)) or '?'}; {'a' if facts.chat else 'no'} chat template; prompts in {data.prompt_field!r}, "
        f"answers in {data.answer_field!r}"
    )
    print("\n".join(draft.assumed(facts, data, wish, options.said)))
    print(f"next: look at both files, then scavenger init {options.folder} --check, then sbatch {options.folder / 'train.sbatch'}")


def _whole(path: Path) -> Path:
    """Absolute, without following links: a pattern is no path that could be resolved."""
    return path if path.is_absolute() else Path.cwd() / path


def examine(options: argparse.Namespace) -> int:
    folder = options.folder.resolve()
    script = folder / "train.sbatch"
    gpus = check.gpus_of(script.read_text(encoding="utf-8") if script.is_file() else "")
    if options.gpu_memory_gb:
        gpus = check.Gpus(gpus.ranks, gpus.per_node, options.gpu_memory_gb, gpus.nodes)
    lines, fine = check.told(folder / "run.toml", list(check.check(folder / "run.toml", gpus)))
    print("\n".join(lines))
    return 0 if fine else ConfigError.exit_code


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        if options.command == "check":
            return examine(options)
        write(options)
    except ScavengerError as error:
        print(f"scavenger: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
