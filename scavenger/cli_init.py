"""`scavenger init`: a site's scavenger.toml and keys, or a run's run.toml and train.sbatch. Owns the arguments and what is printed.

A run's files are looked at and written by `trainer.prepare`, in a process of its own: this package never imports the trainer.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from scavenger import config, keys, toml
from scavenger.cli_options import DEFAULT_CONFIG
from scavenger.errors import ConfigError, ScavengerError

RUN = "Of a run"


def init(
    directory: Annotated[Path, typer.Argument(help="where the files go; its name is the run's")] = Path(),
    model: Annotated[Path | None, typer.Option(help="make a run of this model, a Hugging Face folder", rich_help_panel=RUN)] = None,
    data: Annotated[Path | None, typer.Option(help="on these problems: JSONL or Parquet, a file or a folder", rich_help_panel=RUN)] = None,
    check: Annotated[bool, typer.Option("--check", help="say what would stop the run in DIRECTORY", rich_help_panel=RUN)] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite run.toml and train.sbatch", rich_help_panel=RUN)] = False,
    reward: Annotated[str, typer.Option(help="module:function; default: a verifier that fits the answers", rich_help_panel=RUN)] = "",
    prompt_field: Annotated[str, typer.Option(help="column of the prompts", rich_help_panel=RUN)] = "",
    answer_field: Annotated[str, typer.Option(help="column of the answers", rich_help_panel=RUN)] = "",
    engine: Annotated[str, typer.Option(help="vllm or reference; default: vllm where installed", rich_help_panel=RUN)] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each training node", rich_help_panel=RUN)] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="training nodes", rich_help_panel=RUN)] = 1,
    gpu_memory_gb: Annotated[float, typer.Option(min=0, help="of one GPU; 0: 80, or what train.sbatch says", rich_help_panel=RUN)] = 0,
    state_dir: Annotated[str, typer.Option(help="the daemon's; default: as ./scavenger.toml says", rich_help_panel=RUN)] = "",
    partition: Annotated[str, typer.Option(help="a run: where it trains (reserved); a site: what is harvested (scavenge)")] = "",
    listen: Annotated[str, typer.Option(help="a site: interface that workers reach")] = "0.0.0.0",
    ledger: Annotated[str, typer.Option(help="a site: SQLAlchemy URL; default: SQLite in the state directory, on a local disk")] = "",
) -> None:
    """Write a run's run.toml and train.sbatch (--model, --data), check them (--check), or write a site's scavenger.toml and keys.

    Existing files are left as they are; a run's only with --force are overwritten.
    """
    if (model is None) != (data is None):
        raise typer.BadParameter("a run needs both --model and --data")
    memory = ["--gpu-memory-gb", str(gpu_memory_gb)] if gpu_memory_gb else []
    if model is not None and data is not None:
        told = {
            "--model": str(model), "--data": str(data), "--reward": reward, "--prompt-field": prompt_field, "--answer-field": answer_field,
            "--engine": engine, "--gpus": str(gpus), "--nodes": str(nodes), "--state-dir": state_dir or _known_state_dir(),
            "--partition": partition or "reserved",
        }  # fmt: skip
        words = [f"{name}={value}" for name, value in told.items() if value]
        _prepare(["draft", str(directory), *words, *memory, *(["--force"] if force else [])], Path())
    elif not check:
        _site(directory, partition or "scavenge", listen, ledger)
    if check:
        folder = directory.resolve()
        if not (folder / "run.toml").is_file():
            raise ConfigError(f"{folder} holds no run.toml", f"`scavenger init {directory} --model PATH --data PATH` writes one")
        _prepare(["check", str(folder), *memory], folder)  # the job starts there, too: a reward function may lie beside


def _known_state_dir() -> str:
    """Of the daemon whose configuration is at hand; "" where none is, and the run's file says that it must be set."""
    path = Path(os.environ.get("SCAVENGER_CONFIG") or DEFAULT_CONFIG)
    return str(config.read_daemon(path).daemon.state_dir.resolve()) if path.is_file() else ""


def _prepare(words: Sequence[str], folder: Path) -> None:
    """Run `python -m trainer.prepare` and end with its status where it refuses."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this Python ({sys.executable}) has no {' and no '.join(missing)}", 'pip install ".[trainer]" in a clone')
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-m", "trainer.prepare", *words], cwd=folder, env=environ, stdin=subprocess.DEVNULL, check=False)
    if done.returncode < 0:
        raise ScavengerError(f"trainer.prepare was ended by signal {-done.returncode}", "try again")
    if done.returncode:
        raise typer.Exit(done.returncode)


def _site(directory: Path, partition: str, listen: str, ledger: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path, state_dir = directory / "scavenger.toml", (directory / "state").resolve()
    for written in keys.init_state(state_dir, getpass.getuser()):
        print(f"wrote {written}")
    if path.exists():
        print(f"left {path} as it is")
        return
    document: dict[str, dict[str, object]] = {
        "daemon": {"state_dir": state_dir, "listen": listen, "advertise": os.uname().nodename} | ({"ledger": ledger} if ledger else {}),
        "harvest": {"partition": partition},
    }
    keys.write_private(path, toml.dumps(document).encode())  # a ledger's URL may hold a password
    print(f"wrote {path}; next: scavenger check-config {path}, then scavenger daemon --config {path}")
