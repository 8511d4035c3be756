"""Which prompts a step trains on. Deterministic by seed and position, so a resumed run needs nothing but its step.

Owns order, chat templates and tokenisation; knows no reward, model or socket. Position p of the training stream is the same prompt in
every attempt of a run. A step takes the next n positions, or more where it replaces some. A resume needs only how many were taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from blake3 import blake3
from tokenizers import Tokenizer

from scavenger.config import DataSection, DataSet, EvalSet, RunConfig
from scavenger.errors import ConfigError
from trainer.data import dataset
from trainer.data.batching import shuffled
from trainer.data.curriculum import Visit
from trainer.data.dataset import Item, Prompt
from trainer.data.mixture import Mixture
from trainer.tasks import sort


@dataclass(frozen=True, slots=True)
class PromptTask:
    """`index` is its position in the stream it was taken from; `meta` is what the reward verifies against."""

    index: int
    text: str
    tokens: tuple[int, ...]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EvalPrompts:
    """Prompts of one data set to evaluate on: `name` "" is that of `eval.prompts`. Indices go on from one set to the next."""

    name: str
    samples: int
    prompts: tuple[PromptTask, ...]


#: Key of a prompt's metadata: which of `data.sets` it is of.
DATA_SET = "data_set"
#: (text, meta) of a prompt.
PromptRow = tuple[str, dict[str, Any]]


class Stream(Protocol):
    """An endless, seeded stream of training prompts and a fixed set of held-out ones, as (text, meta)."""

    def train(self, position: int) -> PromptRow: ...

    def held_out(self, index: int) -> PromptRow: ...

    def visit(self, position: int) -> Visit:
        """Which row a training position is, and for which time."""
        ...

    def digest(self) -> str:
        """Equal digests: the same training prompts at all positions."""
        ...


class SortStream:
    """The built-in task: prompts are made, not read."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train(self, position: int) -> tuple[str, dict[str, Any]]:
        return sort.prompt_task(self._seed, position)

    def held_out(self, index: int) -> tuple[str, dict[str, Any]]:
        return sort.prompt_task(self._seed, index, held_out=True)

    def visit(self, position: int) -> Visit:
        return Visit(str(position), 0)

    def digest(self) -> str:
        return f"sort-{self._seed}"


class FileStream:
    """Rows of a data set, reshuffled each epoch. `held_out` of them, chosen by the seed, are never trained on."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        seed: int,
        held_out: int,
        other: Sequence[PromptRow] = (),
        origin: str = "",
        name: str = "data.path",
    ) -> None:
        """`other`: where held-out rows come from instead. `origin`: digest of what the rows were made from. `name`: in errors.

        Raises `ConfigError` when there are too few rows.
        """
        order = shuffled(range(len(rows)), f"split/{seed}")
        self._rows = rows
        self._seed = seed
        self._origin = origin
        if other:
            chosen = shuffled(range(len(other)), f"split/{seed}")[:held_out]
            if len(chosen) < held_out:
                raise ConfigError(
                    f"eval.path has {len(other)} rows, eval.prompts = {held_out} wants more",
                    "lower eval.prompts",
                )
            self._held_out, self._train = [other[index] for index in chosen], sorted(order)
        else:
            if held_out >= len(order):
                raise ConfigError(
                    f"{name} has {len(order)} rows, {held_out} held-out prompts (eval.prompts) leave none to train on",
                    "lower eval.prompts",
                )
            self._held_out, self._train = (
                [rows[index] for index in order[:held_out]],
                sorted(order[held_out:]),
            )
        self._epoch: tuple[int, Sequence[int]] = (-1, ())

    def train(self, position: int) -> PromptRow:
        return self._rows[self._row(position)[0]]

    def visit(self, position: int) -> Visit:
        row, epoch = self._row(position)
        return Visit(str(row), epoch)

    def _row(self, position: int) -> tuple[int, int]:
        """The row's number and the epoch."""
        epoch, offset = divmod(position, len(self._train))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, shuffled(self._train, f"epoch/{self._seed}/{epoch}"))
        return self._epoch[1][offset], epoch

    def held_out(self, index: int) -> PromptRow:
        return self._held_out[index]

    def digest(self) -> str:
        return blake3(f"{self._seed}/{len(self._train)}/{self._origin}".encode()).hexdigest(16)


class MixedStream:
    """Several data sets, mixed by weight. Held-out prompts are of the sets in the same proportions; `elsewhere`: of `eval.path`, which the
    first stream has."""

    def __init__(
        self,
        names: Sequence[str],
        streams: Sequence[FileStream],
        mixture: Mixture,
        *,
        elsewhere: bool = False,
    ) -> None:
        self._names, self._streams, self._mixture, self._elsewhere = names, streams, mixture, elsewhere

    def train(self, position: int) -> PromptRow:
        place = self._mixture.at(position)
        text, meta = self._streams[place.set].train(place.number)
        return text, meta | {DATA_SET: self._names[place.set]}

    def visit(self, position: int) -> Visit:
        place = self._mixture.at(position)
        row, epoch = self._streams[place.set].visit(place.number)
        return Visit(f"{place.set}/{row}", epoch)

    def held_out(self, index: int) -> PromptRow:
        if self._elsewhere:
            return self._streams[0].held_out(index)
        place = self._mixture.at(index)
        text, meta = self._streams[place.set].held_out(place.number)
        return text, meta | {DATA_SET: self._names[place.set]}

    def digest(self) -> str:
        parts = [[name, one.digest()] for name, one in zip(self._names, self._streams, strict=True)]
        return blake3(json.dumps([parts, self._mixture.shares]).encode()).hexdigest(16)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """An environment's tasks: how many, 0 = without end, and a digest of them."""

    count: int
    digest: str


class TaskStream:
    """Tasks of an environment by their numbers, reshuffled each epoch. `held_out` of them, chosen by the seed, are never trained on.

    A task set without end is taken in its own order, and holds none out.
    """

    def __init__(self, tasks: TaskSet, seed: int, held_out: int) -> None:
        """Raises `ConfigError` when there are too few tasks."""
        if tasks.count and held_out >= tasks.count:
            raise ConfigError(
                f"data.environment has {tasks.count} tasks, eval.prompts = {held_out} leaves none to train on",
                "lower eval.prompts",
            )
        if not tasks.count and held_out:
            raise ConfigError(
                f"data.environment has tasks without end, of which eval.prompts = {held_out} cannot be held out",
                "set eval.prompts = 0",
            )
        self._endless, self._digest = not tasks.count, f"{seed}/{held_out}/{tasks.digest}"
        rows: list[PromptRow] = [(f"task {number}", {"task": number}) for number in range(tasks.count)]
        self._rows = FileStream(rows, seed, held_out) if rows else None

    def train(self, position: int) -> PromptRow:
        if self._rows is None:
            return f"task {position}", {"task": position}
        return self._rows.train(position)

    def visit(self, position: int) -> Visit:
        return Visit(str(position), 0) if self._rows is None else self._rows.visit(position)

    def held_out(self, index: int) -> PromptRow:
        assert self._rows is not None
        return self._rows.held_out(index)

    def digest(self) -> str:
        return blake3(f"environment/{self._digest}".encode()).hexdigest(16)


class PromptTemplate:
    """The text that the model sees: a prompt rendered by the model's own chat template, or as it stands where `data.chat` is false.

    The template comes with the model's folder; transformers renders it in its sandbox, and no other code of the folder is run.
    Raises `ConfigError` at once where chat is wanted and the folder has no template.
    """

    def __init__(self, folder: Path, data: DataSection) -> None:
        self._system = data.system
        self._options: dict[str, Any] = dict(data.chat_options)
        self._tokenizer: Any = None
        if not data.chat:
            return
        from transformers import AutoTokenizer  # a second of imports that most runs do without

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a class of transformers raises for files it cannot read
            raise ConfigError(
                f"data.chat: transformers cannot open the tokenizer in {folder}: {error}",
                "copy tokenizer_config.json and tokenizer.json from the model again, or set data.chat = false",
            ) from error
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"data.chat: {folder} has no chat template",
                "set data.chat = false, or take the model's instruct version",
            )
        self.text("?", "a prompt of one user's turn")

    @property
    def source(self) -> str:
        """What is rendered, as it stands: what it renders may hold the day's date."""
        chat = self._tokenizer.chat_template if self._tokenizer is not None else ""
        return json.dumps([chat, self._system, self._options], sort_keys=True, default=str)

    def text(self, prompt: Prompt, where: str) -> str:
        """Ends where the assistant's turn begins. Raises `ConfigError`, naming `where`, for a conversation without a template or one
        that the template cannot render.
        """
        if self._tokenizer is None:
            if not isinstance(prompt, str):
                raise ConfigError(
                    f"{where}: the prompt is a conversation, and data.chat is false", "set data.chat = true"
                )
            return self._system + prompt
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self._system}, *turns]
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False, **self._options
            )
        except Exception as error:  # a template is code that came with the model
            raise ConfigError(
                f"{where}: the model's chat template raised {type(error).__name__}: {error}",
                "look at this row's turns (each with a role and text as its content), at data.chat_options and data.system",
            ) from error
        return text


class PromptSource:
    """The run's prompts, tokenised. `say` gets a line where some are left out.

    Raises `ConfigError` for a prompt that leaves no room for a completion: where prompts are read from files, all are looked at first.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        say: Callable[[str], None] = print,
        tasks: TaskSet | None = None,
    ) -> None:
        """`tasks`: of `data.environment`, whose prompts nobody knows before they are played."""
        self._config = config
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._say = say
        self._max_prompt_tokens = config.model.context_length - config.sampling.max_tokens
        self._eval_count = config.eval.prompts
        #: Tokens of the longest prompt in the files; 0 where prompts are made.
        self.longest = 0
        self._stream: Stream = SortStream(config.data.seed)
        if tasks is not None:
            self._stream = TaskStream(tasks, config.data.seed, config.eval.prompts)
        elif config.data.sets:
            self._stream = self._mixed()
        elif config.data.path is not None and config.data.task != "sort":
            self._stream = self._from_files(config.data.path)
        #: Of the training prompts and their order: what a resumed run must find as it left it.
        self.digest = self._stream.digest()
        self.evaluations = self._evaluations()

    def _from_files(self, path: Path) -> FileStream:
        config = self._config
        template = PromptTemplate(config.model.path, config.data)
        items, rows = self._fitting(dataset.read(config.data, path), template, path)
        _, other = (
            self._fitting(dataset.read(config.data, config.eval.path), template, config.eval.path)
            if config.eval.path
            else ((), ())
        )
        origin = origin_of(items, template, config.data.answer_field)
        return FileStream(rows, config.data.seed, config.eval.prompts, other, origin)

    def _mixed(self) -> MixedStream:
        """Of `data.sets`. Raises `ConfigError` as `_from_files`, naming the set's files."""
        config, sets = self._config, self._config.data.sets
        mixture = Mixture([one.weight for one in sets])
        counts = mixture.counts(config.eval.prompts)
        other: Sequence[PromptRow] = ()
        if config.eval.path:
            data = self._data_of(None)
            template = PromptTemplate(config.model.path, data)
            _, other = self._fitting(dataset.read(data, config.eval.path), template, config.eval.path)
            counts = [config.eval.prompts, *(0 for _ in sets[1:])]
        streams: list[FileStream] = []
        for one, held_out in zip(sets, counts, strict=True):
            data = self._data_of(one)
            template = PromptTemplate(config.model.path, data)
            items, rows = self._fitting(dataset.read(data, one.path, "data.sets"), template, one.path)
            if any(DATA_SET in item.columns for item in items):
                raise ConfigError(
                    f"{one.path}: a column is named {DATA_SET!r}, which says of which set a row is",
                    "name that column otherwise",
                )
            origin = origin_of(items, template, data.answer_field)
            mine = () if streams else other
            streams.append(FileStream(rows, data.seed, held_out, mine, origin, f"data.sets: {one.name!r}"))
        names = [one.name for one in sets]
        return MixedStream(names, streams, mixture, elsewhere=config.eval.path is not None)

    def _data_of(self, one: DataSet | EvalSet | None) -> DataSection:
        """How the rows of a set (None: of `eval.path`) are read: as `data` says, but for what the set says itself."""
        data = self._config.data
        named = ("prompt_field", "answer_field", "task")
        own = {key: getattr(one, key) for key in named if getattr(one, key, None) is not None}
        return data.model_copy(update=({"task": "jsonl"} if data.task == "sort" else {}) | own)

    def _fitting(
        self, items: Sequence[Item], template: PromptTemplate, path: Path
    ) -> tuple[Sequence[Item], list[PromptRow]]:
        """Every row as the model sees it; those that leave no room for a completion are reported, all at once."""
        rows = [(template.text(item.prompt, f"{path}, row {item.row}"), item.meta) for item in items]
        lengths = [
            len(found.ids)
            for found in self._tokenizer.encode_batch([text for text, _ in rows], add_special_tokens=False)
        ]
        wrong = [offset for offset, length in enumerate(lengths) if not 0 < length <= self._max_prompt_tokens]
        self.longest = max(
            [self.longest, *(length for length in lengths if length <= self._max_prompt_tokens)]
        )
        if not wrong:
            return items, rows
        listed = ", ".join(f"row {items[offset].row} has {lengths[offset]}" for offset in wrong[:5])
        cause = f"{path}: {len(wrong)} of {len(rows)} prompts do not have 1 to {self._max_prompt_tokens} tokens: {listed}"
        if self._config.data.on_overlong == "stop" or len(wrong) == len(rows):
            raise ConfigError(
                cause,
                'raise model.context_length, lower sampling.max_tokens, or set data.on_overlong = "drop"',
            )
        self._say(f"{cause}; they are left out")
        left_out = set(wrong)
        kept = [offset for offset in range(len(rows)) if offset not in left_out]
        return [items[offset] for offset in kept], [rows[offset] for offset in kept]

    def take(self, position: int, count: int) -> list[PromptTask]:
        """`count` prompts of the training stream from `position` on."""
        return [
            self._prompt_task(offset, *self._stream.train(offset))
            for offset in range(position, position + count)
        ]

    def visit(self, position: int) -> Visit:
        """Which row position `position` of the training stream is, and for which time."""
        return self._stream.visit(position)

    def held_out(self) -> list[PromptTask]:
        return [self._prompt_task(index, *self._stream.held_out(index)) for index in range(self._eval_count)]

    def _evaluations(self) -> list[EvalPrompts]:
        """Every data set that has prompts: the held-out ones, then those of `eval.sets` in their order."""
        held_out, section = self.held_out(), self._config.eval
        sets = [EvalPrompts("", section.samples, tuple(held_out))] if held_out else []
        first = len(held_out)
        for one in section.sets:
            tasks = tuple(
                self._prompt_task(first + place, *row) for place, row in enumerate(self._rows_of(one))
            )
            sets.append(EvalPrompts(one.name, one.samples or section.samples, tasks))
            first += len(tasks)
        return sets

    def _rows_of(self, one: EvalSet) -> list[PromptRow]:
        """The chosen rows of a set. Raises `ConfigError` where it has fewer."""
        data = self._data_of(one)
        _, rows = self._fitting(
            dataset.read(data, one.path, "eval.sets"), PromptTemplate(self._config.model.path, data), one.path
        )
        if one.prompts > len(rows):
            raise ConfigError(
                f"eval.sets: {one.path} has {len(rows)} rows, prompts = {one.prompts} wants more",
                f"lower prompts of the set {one.name!r}; 0 takes all rows",
            )
        return [
            rows[index] for index in shuffled(range(len(rows)), f"split/{data.seed}")[: one.prompts or None]
        ]

    def _prompt_task(self, index: int, text: str, meta: dict[str, Any]) -> PromptTask:
        if self._tasks is not None:
            return PromptTask(index, text, (), meta)
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not 0 < len(tokens) <= self._max_prompt_tokens:
            raise ConfigError(
                (
                    f"prompt {index} has {len(tokens)} prompt tokens, sampling.max_tokens leaves "
                    f"room for 1 to {self._max_prompt_tokens}: {text[:60]!r}"
                ),
                "raise model.context_length, lower sampling.max_tokens or leave the prompt out",
            )
        return PromptTask(index, text, tokens, meta)


def origin_of(items: Sequence[Item], template: PromptTemplate, answer_field: str) -> str:
    """Digest of prompts, metadata and template; not of the texts, which differ from day to day where a template writes the date.

    The answer and the row's place come last, as in 0.2.0, whose runs go on. Columns that have their names come behind all else.
    """
    hasher = blake3(template.source.encode())
    for item in items:
        meta = {name: value for name, value in item.columns.items() if name != answer_field}
        hidden = [meta[name] for name in ("answer", "row") if name in meta]
        meta |= ({} if item.answer is None else {"answer": item.answer}) | {"row": item.row}
        hasher.update(json.dumps([item.prompt, meta, *hidden], ensure_ascii=False).encode() + b"\n")
    return hasher.hexdigest(16)


def unknown_note(tokenizer: Tokenizer, prompts: Sequence[PromptTask]) -> str:
    """What is said where the model would read something else than these prompts; "" where its tokenizer knows all that they hold."""
    named = getattr(tokenizer.model, "unk_token", None)
    unknown = tokenizer.token_to_id(named) if named else None
    if unknown is None:
        return ""
    lost = [one for one in prompts if unknown in one.tokens]
    if not lost:
        return ""
    shown = tokenizer.decode(list(lost[0].tokens), skip_special_tokens=False)
    many = f"{len(lost)} of {len(prompts)} prompts"
    return (
        f"LOOK: {many} hold what the tokenizer does not know and reads as {named!r}, such as {shown[-60:]!r}"
    )


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises `ConfigError`."""
    if not folder.is_dir():
        raise ConfigError(f"model.path: there is no folder {folder}", "name the model's folder")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"model.path: {folder} holds no tokenizer.json", "save the model's fast tokenizer there"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{path} is no tokenizer: {error}", "save the model's fast tokenizer there"
        ) from error


def vocabulary(tokenizer: Tokenizer) -> str:
    """Digest of the tokens by their ids: equal where ids mean the same tokens, whatever the tokenizers do to text before."""
    found = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return blake3(msgspec.json.encode(found)).hexdigest()


def stop_tokens(folder: Path, configured: tuple[int, ...]) -> tuple[int, ...]:
    """Which tokens end a completion: `sampling.stop_token_ids`, else the model's own. Raises `ConfigError` when there are none."""
    if configured:
        return configured
    for name in ("generation_config.json", "config.json"):
        found = _named_end(folder / name)
        if found:
            return found
    raise ConfigError(f"{folder} names no eos_token_id", "set sampling.stop_token_ids")


def _named_end(path: Path) -> tuple[int, ...]:
    """What a model's JSON file names as `eos_token_id`, one or a list; () where it names none or is not there. Raises `ConfigError`."""
    if not path.is_file():
        return ()
    remedy = "copy it from the model again, or set sampling.stop_token_ids"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", remedy) from error
    named = found.get("eos_token_id") if isinstance(found, dict) else None
    tokens = named if isinstance(named, list) else [] if named is None else [named]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(
                f"{path}: eos_token_id = {json.dumps(named)} is no token and no list of tokens", remedy
            )
    return tuple(tokens)
