"""Single-turn environments of the `verifiers` package (its classic API): their rows as a data set, their rubric as a reward function.

    python -m trainer.data.environments gsm8k FOLDER --args '{"num_train_examples": 100}'

writes train.jsonl and test.jsonl, which `[data]` reads like any others; `[reward] function =
"trainer.data.environments:reward"` judges by the
environment's rubric. Owns all that is known of that package here, and imports it in this command and the reward's process alone. A row
goes through the environment's own rollout, with a client that gives the model's finished completion in a model's place: so prompt, state
and completion are what the package makes them. Exceptions of the rubric's functions, which the package logs and counts as 0, are raised.
Boundary: the `verifiers` package, imported nowhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.metadata
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from scavenger.errors import ConfigError, ScavengerError
from trainer.verifiers import prepared

#: From the first release with clients of its own to the last before the rewrite.
OLDEST, BEFORE = (0, 1, 11), (0, 2, 0)
REQUIREMENT = "verifiers>=0.1.11,<0.2"
#: The column that carries what the rubric needs: the environment's own row, and which prompt it makes of it.
COLUMN = "verifiers"
SPLITS = ("train", "test")
ROLES = ("system", "user", "assistant")


def check_version(version: str | None) -> None:
    """Raises `ConfigError` for a release of `verifiers` that this module does not know; None: there is none."""
    remedy = f"pip install '{REQUIREMENT}' into {sys.prefix} (docs/training.md)"
    if version is None:
        raise ConfigError(f"this Python ({sys.executable}) has no verifiers package", remedy)
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if found >= BEFORE:
        raise ConfigError(
            f"verifiers {version} has another API than the environments of 0.1 that are read here", remedy
        )
    if found < OLDEST:
        raise ConfigError(f"verifiers {version} is too old", remedy)


def _installed() -> str | None:
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return None


class Environment:
    """An environment that can be asked for its prompts and rewards. Raises `ConfigError` where it cannot be loaded or served.

    `zero`: a rubric's function that raises counts as 0, as it does in the package.
    """

    def __init__(self, name: str, args: dict[str, Any], *, zero: bool = False) -> None:
        version = _installed()
        check_version(version)
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        self.name, self.args = name, args
        self.environment = _load(name, args)
        self._raised: list[Exception] = []
        self._sent: list[str | list[dict[str, Any]]] = []
        self._runner = (
            asyncio.Runner()
        )  # one loop for all calls: what a rubric keeps between them belongs to it
        for leaf in _leaves(self.environment):
            _check(name, leaf)
            for rubric in _rubrics(leaf.rubric):
                _check_rubric(name, rubric)
                if not zero:
                    rubric.funcs = [self._reporting(function) for function in rubric.funcs]
        self.digest = _digest([version, _source(name)])

    def prompt(self, row: dict[str, Any]) -> str | list[dict[str, Any]]:
        """What the environment sends to a model for this row: text, or a conversation. Without its rewards: no completion is there."""
        self.environment.set_score_rollouts(False)
        try:
            self._roll(row, "")
        finally:
            self.environment.set_score_rollouts(True)
        if len(self._sent) != 1:
            raise ValueError(f"the environment asks its model {len(self._sent)} times")
        return self._sent[0]

    def score(self, row: dict[str, Any], sent: str, completion: str) -> float:
        """The weighted sum of the rubric's functions. `sent`: digest of the prompt that was answered.

        Raises what a function raised, and `ValueError` where the environment does not make the same prompt of the row again.
        """
        output = self._roll(row, completion)
        if self._raised:
            raise self._raised[0]
        if [_digest(prompt) for prompt in self._sent] != [sent]:
            raise ValueError(
                "the environment makes another prompt of this row than was answered: write the rows again, with the same args"
            )
        return float(output["reward"])

    def _roll(self, row: dict[str, Any], completion: str) -> Any:
        self._raised.clear()
        self._sent.clear()
        output = self._runner.run(
            self.environment.run_rollout(row, self._client(completion), "scavenger", {})
        )
        if output.get("error") is not None and not self._raised:
            raise RuntimeError(f"the environment's rollout failed: {output['error']}")
        return output

    def _client(self, completion: str) -> Any:
        """A client of the package that knows one completion and notes what it was asked."""
        from verifiers.clients import Client
        from verifiers.types import Response, ResponseMessage

        async def get_response(
            client: Any, prompt: Any, model: str, *_: Any, tools: Any = None, **__: Any
        ) -> Any:
            if tools:
                raise ValueError("the environment offers tools: only one turn of text is supported")
            self._sent.append(_turns(prompt))
            return Response(
                id="",
                created=0,
                model=model,
                usage=None,
                message=ResponseMessage(content=completion, finish_reason="stop", is_truncated=False),
            )

        unused = dict.fromkeys(Client.__abstractmethods__)  # they speak to servers
        return type("Finished", (Client,), {**unused, "get_response": get_response})(None)

    def _reporting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its exceptions noted; its name and signature, by which the package calls it, stay."""

        @functools.wraps(function)
        async def call(*given: Any, **named: Any) -> float:
            try:
                found = function(*given, **named)
                return float(await found if inspect.isawaitable(found) else found)
            except Exception as error:
                self._raised.append(error)
                raise

        return call


def _load(name: str, args: dict[str, Any]) -> Any:
    try:
        import verifiers

        return verifiers.load_environment(name, **args)
    except Exception as error:  # whatever the environment's own code and its data set raise
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        raise ConfigError(
            f"the environment {name!r} cannot be loaded with args = {json.dumps(args)}",
            f"install its package for {sys.executable}, give the args that it wants, and load its data set once where the network is "
            "(python -m trainer.data.environments does): training jobs read the Hugging Face cache only",
            quoted=f"{type(cause).__name__}: {cause}",
        ) from error


def _leaves(environment: Any) -> Iterator[Any]:
    """The environment, or those that it groups."""
    from verifiers import EnvGroup

    if isinstance(environment, EnvGroup):
        for one in environment.envs:
            yield from _leaves(one)
    else:
        yield environment


def _rubrics(rubric: Any) -> Iterator[Any]:
    """The rubrics that have functions: of a group its members'."""
    for one in getattr(rubric, "rubrics", None) or ():
        yield from _rubrics(one)
    if not getattr(rubric, "rubrics", None):
        yield rubric


def _check(name: str, environment: Any) -> None:
    """Raises `ConfigError` where more than one turn of text is wanted."""
    from verifiers import SingleTurnEnv

    kind, remedy = (
        type(environment).__name__,
        "take a SingleTurnEnv without tools, or write a reward function of your own",
    )
    if not isinstance(environment, SingleTurnEnv):
        raise ConfigError(
            f"the environment {name!r} is a {kind}, which may take several turns: only one of text is supported",
            remedy,
        )
    if environment.tool_defs:
        raise ConfigError(
            f"the environment {name!r} offers tools: only one turn of text is supported", remedy
        )
    if not environment.score_rollouts:
        raise ConfigError(
            f"the environment {name!r} has score_rollouts = False: it rewards nothing",
            "switch that on in its args",
        )


def _check_rubric(name: str, rubric: Any) -> None:
    """Raises `ConfigError` for rewards that do not follow from one row and one completion alone."""
    from verifiers import JudgeRubric

    remedy = "choose another rubric in the environment's args, or write a reward function of your own"
    if isinstance(rubric, JudgeRubric) or any("judge" in given for given in rubric.class_objects):
        raise ConfigError(
            f"the rubric of {name!r} asks a judge model: no reward may depend on what a server says at the moment",
            remedy,
        )
    groups = [function.__name__ for function in rubric._get_group_reward_funcs()]
    if groups or getattr(rubric, "has_advantages", False):
        what = f"the function {groups[0]} judges" if groups else "it judges"
        raise ConfigError(
            f"the rubric of {name!r} rewards no completion by itself: {what} those of a group together",
            remedy,
        )


def _turns(prompt: Any) -> str | list[dict[str, Any]]:
    """The package's messages as a chat template takes them. Raises `ValueError` for what is not text."""
    given = [dict(turn) if isinstance(turn, dict) else turn.model_dump() for turn in prompt]
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in given]
    if any(not isinstance(turn.get("content"), str) for turn in turns):
        raise ValueError("a turn of the prompt is not text")
    if len(turns) == 1 and turns[0]["role"] == "text":
        return str(turns[0]["content"])
    strange = [turn["role"] for turn in turns if turn["role"] not in ROLES or turn.get("tool_calls")]
    if strange or not turns:
        raise ValueError(
            f"the prompt has a turn of {strange[0]!r} with tools" if strange else "the prompt has no turn"
        )
    return turns


def _digest(value: Any) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest(8)


def _source(name: str) -> list[str]:
    """The text of the environment's module, of all that lie in its folder where it is a package: what its rewards follow from."""
    file = getattr(sys.modules.get(name.replace("-", "_").split("/")[-1]), "__file__", None)
    if file is None:
        return []
    path = Path(file)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return [each.read_text(encoding="utf-8", errors="replace") for each in files]


@functools.lru_cache(maxsize=1)
def _opened(name: str, args: str, on_error: str) -> Environment:
    if on_error not in ("raise", "zero"):
        raise ConfigError(
            f'reward.options: on_error = {on_error!r} is neither "raise" nor "zero"', "leave it out"
        )
    return Environment(name, json.loads(args), zero=on_error == "zero")


def _open(environment: str, args: dict[str, Any] | None = None, on_error: str = "raise") -> str:
    """Load it before the first deadline. What the rewards follow from beside this file."""
    return _opened(environment, json.dumps(args or {}, sort_keys=True), on_error).digest


@prepared(_open)
def reward(
    prompt: str,
    completion: str,
    meta: dict[str, Any],
    *,
    environment: str,
    args: dict[str, Any] | None = None,
    on_error: str = "raise",
) -> float:
    """What the environment's rubric gives for the completion of a row that this module's command wrote."""
    row = meta.get(COLUMN)
    if not isinstance(row, dict) or row.get("environment") != environment:
        raise ValueError(
            f"this is no row of {environment!r}: write its rows with python -m trainer.data.environments"
        )
    opened = _opened(environment, json.dumps(args or {}, sort_keys=True), on_error)
    return opened.score(row["input"], row["sent"], completion)


def rows(environment: Environment, dataset: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A data set's rows as lines of JSON. Raises `ConfigError` naming the row that cannot be one."""
    for number, row in enumerate(dataset):
        try:
            sent = environment.prompt(row)
            answer = row.get("answer")
            carried = {
                "environment": environment.name,
                "args": environment.args,
                "sent": _digest(sent),
                "input": row,
            }
            yield json.dumps(
                {"prompt": sent, "answer": "" if answer is None else answer, COLUMN: carried},
                ensure_ascii=False,
            )
        except Exception as error:  # the environment's own code makes the prompt
            raise ConfigError(
                f"row {number} of {environment.name!r} cannot be written",
                "only rows of text are supported, which JSON can hold",
                quoted=f"{type(error).__name__}: {error}",
            ) from error


def write(environment: Environment, folder: Path, *, force: bool) -> list[tuple[Path, int]]:
    """The files that were written, with their rows. Those of an earlier call stay unless `force`. Raises `ConfigError`."""
    paths = [folder / f"{split}.jsonl" for split in SPLITS]
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise ConfigError(
            f"{' and '.join(there)} exist already", "choose another folder, or overwrite them with --force"
        )
    datasets = [environment.environment.build_dataset(), environment.environment.build_eval_dataset()]
    if datasets[0] is None:
        raise ConfigError(
            f"the environment {environment.name!r} has no training data set",
            "take another, or args with which it has one",
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path, dataset in zip(paths, datasets, strict=True):
        path.unlink(missing_ok=True)  # of an environment that had one
        if dataset is None:
            continue
        part, count = path.with_suffix(".part"), 0
        with part.open("w", encoding="utf-8") as file:
            for line in rows(environment, dataset):
                file.write(line + "\n")
                count += 1
        part.replace(path)
        written.append((path, count))
    return written


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.data.environments", description="An environment's rows as JSONL files."
    )
    parser.add_argument("environment", help="its name, as verifiers.load_environment takes it")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--args", default="{}", help="a JSON object: keyword arguments of its load_environment"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the files that are there")
    options = parser.parse_args(argv)
    try:
        args = json.loads(options.args)
    except ValueError as error:
        parser.error(f"--args: {error}")
    if not isinstance(args, dict):
        parser.error("--args is no JSON object")
    try:
        for path, count in write(Environment(options.environment, args), options.folder, force=options.force):
            print(f"wrote {path}: {count} rows")
    except ScavengerError as error:
        print(f"scavenger: {error}", file=sys.stderr)
        return error.exit_code
    print(f"next: scavenger init RUN --model PATH --data {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
