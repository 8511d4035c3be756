"""`run.toml`, a run's: every key, its unit, its default, what is allowed and what it does.

docs/config.md is generated from this module: a class's docstring opens its section, the text below a key is its description
(`scavenger.config.reference`). Knows nothing of the daemon's keys, and reads no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from scavenger.config.section import Allowed, Fraction, Name, NonNegative, Positive, Seconds, Section, Share
from scavenger.protocol import engine_options
from scavenger.protocol.messages.common import MAX_GROUP_SAMPLES

#: vLLM refuses a request with a higher one.
MAX_VLLM_TEMPERATURE = 2
Column = Annotated[str, Field(min_length=1), Allowed("column name")]
PartName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_]{0,63}$"),
    Allowed("letters, digits, `_`; 1 to 64, the first a letter or digit"),
]


class RunSection(Section):
    """The run itself: its name, its length, its folders, and how many harvested engines it may have."""

    name: Name
    """Name of the run in the ledger. A run that is opened again under its name goes on, as a new attempt."""
    seed: NonNegative = 0
    """Seed of sampling and of mini-batches. A run cannot be opened again with another seed."""
    steps: NonNegative
    """Optimizer steps of the whole run. 0: none is taken, and its weights answer for an agent of another run's episodes
    (`data.episodes_of`)."""
    state_dir: Path
    """The site's public folder (`daemon.public_dir` of its `scavenger.toml`), or the daemon's `state_dir` where
    the run is the daemon's own user's: the daemon says there where it listens."""
    out_dir: Path
    """Folder of checkpoints and `metrics.jsonl`. All ranks must see it. A relative path is relative to this file;
    in `--set run.out_dir=…` to the folder that the command starts in."""
    deterministic: bool = False
    """`true`: float64 everywhere, one group a micro-batch, exact sums: a preemption then changes no token
    ([architecture.md](architecture.md#deterministic-mode)). Needs `engine.name = "reference"`."""
    harvest: bool = True
    """`false`: only reserved engines generate. Needs `reserved.workers` of 1 or more."""
    max_engines: NonNegative = 64
    """Harvested engines of this run at most. The daemon's `harvest.max_engines` applies too."""
    gpus_per_engine: Positive = 1
    """GPUs of one harvested engine on each of its nodes. vLLM uses all of them (tensor parallel), the reference
    engine one."""
    nodes_per_engine: Positive = 1
    """Nodes of one harvested engine: one job of so many nodes, with `gpus_per_engine` GPUs on each. vLLM only. The
    site allows it with `harvest.max_nodes_per_engine`. The network between the nodes decides the speed:
    `engine.vllm.pipeline_parallel_size` set to the number of nodes keeps tensor parallelism within a node."""
    poison_after: Positive = 3
    """A sample is given up when engines failed on it on so many different nodes, or three times as often on
    fewer."""
    on_poison: Literal["stop", "mask"] = "stop"
    """What happens with a sample that is given up. `stop`: the run stops and names the sample. `mask`: the
    sample is left out of training and counted."""
    isolation: Literal["memory", "process"] = "memory"
    """Whether an engine's process may work for several runs, one after the other, where the site lets engines change hands
    (`harvest.change_hands`). `memory`: it may, and forgets one run before the next begins. `process`: this run's engines
    work for no other run, before or after."""
    share_engines: bool = False
    """`true`: engines of this run may generate samples of other runs that set it too, in one batch with this run's, and this run's samples
    may be generated so, where the site lets engines lend slots (`harvest.lend_slots`). For LoRA runs of one base with equal `[engine]`
    settings and `lora.serve = "unmerged"` ([fleet.md](fleet.md#engines-that-lend-slots))."""
    key: Path | None = None
    """The owner's key file, mode 0600. None: `<state_dir>/keys/owner.key` where there is one, else the user's
    own, which `scavenger join` makes."""

    @property
    def engine_gpus(self) -> int:
        """Of one harvested engine, on all of its nodes."""
        return self.gpus_per_engine * self.nodes_per_engine


class EmbeddedSection(Section):
    """A daemon of the run's own, for a site that runs none ([admin.md](admin.md#without-an-admin-no-root-one-daemon-of-your-own))."""

    embedded: bool = False
    """`true`: the training job starts a daemon on its first node. The daemon ends with the run, and its
    harvested jobs are cancelled with it."""
    config: Path | None = None
    """The `scavenger.toml` of that daemon. None: the one beside this file. Its `daemon.state_dir` must be the
    run's."""


class ModelSection(Section):
    """The model to train."""

    path: Path
    """Hugging Face folder of a causal LM: `config.json`, safetensors weights, `tokenizer.json`. Code in it is
    never run."""
    context_length: Positive
    """Tokens of prompt and completion together at most."""


class DataSet(Section):
    """One of several data sets to train on. A step has prompts of each in the proportion of their weights; each is
    reshuffled when its own epoch is over."""

    name: PartName
    """The reward function gets it as `meta["data_set"]`. The metric `reward_of_<name>` is of its prompts alone."""
    path: Path
    """Its rows, as `data.path`. They are rendered as those are: `data.chat`, `data.system`."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the prompts, in proportion to the other sets' weights."""
    task: Literal["jsonl", "parquet"] | None = None
    """File format. None: as `data.task`; JSONL where that is `sort`."""
    prompt_field: Column | None = None
    """Column of the prompt. None: as `data.prompt_field`."""
    answer_field: Column | None = None
    """Column of the reference answer. None: as `data.answer_field`."""


class AgentPolicy(Section):
    """Which run answers for an agent of `data.environment`: `[data.policies.AGENT]`, by the agent's name."""

    run: Name
    """Name of the run. It is of the same owner, has `data.episodes_of` set to this run's name, and a model with the same
    tokenizer."""


class DataSection(Section):
    """The prompts, and how many of them a step takes."""

    task: Literal["sort", "jsonl", "parquet"] = "sort"
    """File format of `path`. `sort` needs no files: it is a built-in task, to sort six digits."""
    path: Path | None = None
    """The prompts: a file, several files (`*` in the last part of the path), or a folder with such files at
    any depth, such as a clone of a Hugging Face data set. JSONL is UTF-8, one object a line. The reward
    function gets the columns beside prompt and completion. Needed unless `task = "sort"`."""
    prompt_field: Column = "prompt"
    """Column of the prompt: text, or a conversation (a list of objects with `role` and `content`), which
    needs `chat`."""
    answer_field: Column = "answer"
    """Column of the reference answer, which the reward function gets as `meta["answer"]` too. Left out, rows
    may have none: for a judge, tests of code or any reward that needs no answer."""
    sets: Annotated[tuple[DataSet, ...], Allowed("tables `[[data.sets]]`")] = ()
    """Several data sets instead of `path`, mixed by weight: see [below](#datasets)."""
    chat: bool = False
    """`true`: prompts are rendered with the model's chat template, up to where the assistant's turn
    begins."""
    system: str = ""
    """System turn of conversations that have none. Without `chat`: text before every prompt."""
    chat_options: dict[str, bool | int | float | str] = {}
    """Further variables of the chat template, such as `{ enable_thinking = false }`."""
    on_overlong: Literal["stop", "drop"] = "stop"
    """Prompts longer than `model.context_length - sampling.max_tokens`. All prompts are checked before the
    run starts. `stop`: the run does not start. `drop`: it leaves them out and logs how many."""
    prompts_per_step: Positive = 32
    """Prompts (groups) of one step."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=MAX_GROUP_SAMPLES)] = 8
    """Completions of each prompt: the size of a group."""
    seed: NonNegative = 0
    """Seed of the prompts' order, and of which rows of a file are held out for evaluation."""
    filter_min_spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Groups whose greatest and least reward differ by less than this are not trained, and count in no denominator
    ([data.md](data.md#which-groups-and-prompts-are-trained-filter-curriculum-replay)). 0: no bound."""
    filter_mean_min: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Groups whose mean reward is below this are not trained, likewise. None: no bound."""
    filter_mean_max: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Groups whose mean reward is above this are not trained, likewise. None: no bound."""
    curriculum_min: Share | None = None
    """Prompts whose measured pass rate is below this are passed over for `curriculum_rest` epochs. None: none is."""
    curriculum_max: Share | None = None
    """Prompts whose measured pass rate is above this are passed over for `curriculum_rest` epochs. None: none is."""
    curriculum_solved_at: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Completions with this reward or more are passed. Their share of a group is its prompt's measured pass rate."""
    curriculum_rest: Annotated[int, Field(gt=0, le=64)] = 1
    """Epochs after the one in which its pass rate was measured that a prompt is passed over. Then it is measured anew."""
    replay_groups: Annotated[int, Field(ge=0, le=1024)] = 0
    """Groups of earlier steps that each step trains once more, if their weights are at most `algorithm.max_off_policy_steps` older than
    those that are trained. 0: none."""
    environment: str = ""
    """A task set of `verifiers` (0.4, its v1 API), by its package's name: its tasks are the prompts, its harness
    plays each as an episode of one or more turns on this run's engines, and its rewards train it
    ([environments.md](environments.md)). `builtin:calculator`, `builtin:calculator-steps` and `builtin:proposer-solver` are
    built in, for the demo, examples and tests. Excludes `task`, `path` and `reward.function`."""
    environment_args: dict[str, JsonValue] = {}
    """The environment's own settings, as in the `[env]` block of `verifiers`, such as
    `{ taskset = { split = "train" }, agent = { harness = { id = "null" } } }`. A role without a `runtime` has
    `{ type = "subprocess" }`."""
    environment_python: Path | None = None
    """Interpreter of environment workers: of a venv with `scavenger[verifiers]` and the environment's package.
    None: the trainer's own."""
    environment_workers: Annotated[int, Field(gt=0, le=256)] = 1
    """Processes, on the host of rank 0, that play episodes."""
    environment_concurrency: Annotated[int, Field(gt=0, le=4096)] = 64
    """Episodes that one of them plays at once."""
    environment_jobs: Annotated[int, Field(ge=0, le=1024)] = 0
    """Further environment workers, in jobs of their own, that may join while the run goes on
    ([agents.md](agents.md#environment-workers-in-jobs)): the daemon's (`harvest.max_environment_workers`), or yours
    (`scavenger environment-worker`). 0: none."""
    environment_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of rank 0's host that they connect to, at the interface and under the name of `weights.listen` and
    `weights.advertise`. 0: the system chooses. Set it where a firewall stands between training and compute nodes."""
    policies: Annotated[dict[str, AgentPolicy], Allowed("tables `[data.policies.AGENT]`")] = {}
    """Of an environment with several agents: which other run answers for an agent, by the agent's name
    ([agents.md](agents.md#several-policies)). An agent that is not named is this run's."""
    episodes_of: Name | None = None
    """Name of another run, which plays an environment and names this one in its `data.policies`. The steps of this run are
    filled with what its policy said in those episodes. Excludes `environment`, `path` and `sets`."""
    renderer: dict[str, JsonValue] = {}
    """How conversations become tokens: a configuration of the package `renderers`, such as `{ name = "qwen3" }`.
    Empty: chosen by the model's name, and without tools where that is unknown."""
    episode_turns: NonNegative = 0
    """Model calls of one agent in an episode at most; then the episode ends and is rewarded as it is. 0: no bound."""
    episode_tokens: NonNegative = 0
    """Generated tokens of one agent in an episode, after which no further turn begins. 0: no bound."""
    episode_s: Seconds = 3600.0
    """Seconds of an agent in an episode at most, its tools included; then the episode ends and is rewarded as it is."""
    budget_turns: NonNegative = 0
    """Model calls of a whole episode at most, over all its agents, policies and branches; the daemon counts them, also of
    agents of other programs that call the gateway. Then the episode ends and is rewarded as it is. 0: no bound."""
    budget_tokens: NonNegative = 0
    """Generated tokens of a whole episode at most: a turn has as many as are left when it is asked for. 0: no bound."""
    budget_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Seconds of a whole episode from its first call, its tools and its waits included, after which no further call is
    made. One that is generated goes on to its end. Waits for engines and outages count. 0: no bound."""
    on_divergence: Literal["branch", "restart", "fail"] = "branch"
    """An episode whose environment worker was lost is played again from its recorded turns. What happens where the
    environment says something else than it did. `branch`: the episode goes on from there with new turns.
    `restart`: it begins anew. `fail`: it is a failed episode. The ledger has the reason."""
    effects: Literal["none", "external"] = "none"
    """What the environment's tools (MCP servers) do to the world. `none`: nothing that lasts: an episode that is played
    again asks them again. `external`: each call is in the ledger before its tool is asked, and no tool is asked twice:
    recorded answers are used ([agents.md](agents.md#tools-with-effects-outside))."""
    on_doubt: Literal["fail", "tell"] = "fail"
    """With `effects = "external"`: a tool was asked, and its environment worker was lost before its answer was recorded.
    No tool is asked again. `fail`: the episode fails for good. `tell`: the agent is told that the answer is not known,
    as the tool's answer, and goes on."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """What runs as plain processes of an environment worker's host (a role without a `runtime`, or with `subprocess`):
    `none`: as any process of the user's. `bubblewrap`: in a box of its own for each agent
    ([agents.md](agents.md#sandboxes)): no network, a read-only root without homes and keys, and the limits below."""
    sandbox_memory_mb: Positive = 2048
    """Memory of all processes of a box (MiB). Files that they write to /tmp are not in it."""
    sandbox_processes: Positive = 128
    """Processes of a box at once."""
    sandbox_disk_mb: Positive = 512
    """What a box may write (MiB), in memory: gone with it."""
    sandbox_output_mb: Positive = 16
    """Output of one command in a box (MiB)."""
    sandbox_cpu_s: Annotated[float, Field(ge=0)] = 0.0
    """CPU seconds of all processes of an agent's box. 0: as many as `episode_s`."""
    sandbox_readable: Annotated[tuple[Path, ...], Allowed("paths")] = ()
    """Further paths that a box may read, such as data or a tool's programs."""

    @model_validator(mode="after")
    def _environment(self) -> DataSection:
        # A default that a file states, as `scavenger config show` writes it, says nothing.
        said = {
            key
            for key in self.model_fields_set
            if getattr(self, key) != DataSection.model_fields[key].get_default(call_default_factory=True)
        }
        if self.policies and not self.environment:
            raise ValueError("policies are of an environment's agents: set environment, or leave them out")
        if self.episodes_of and (self.environment or self.path is not None or self.sets or "task" in said):
            raise ValueError("episodes_of brings its own rows: leave out environment, task, path and sets")
        if self.environment and (self.path is not None or self.sets or "task" in said):
            raise ValueError("environment brings its own tasks: leave out task, path and sets")
        if self.episodes_of and (budgets := sorted(key for key in said if key.startswith("budget_"))):
            raise ValueError(
                f"{budgets[0]} is of the run that plays the episodes: set it there, or leave it out"
            )
        if not self.environment and (
            named := sorted(
                key for key in said if key.startswith(("environment_", "episode_", "effects", "sandbox"))
            )
        ):
            raise ValueError(f"{named[0]} is of an environment: set environment, or leave it out")
        if "on_doubt" in said and self.effects != "external":
            raise ValueError('on_doubt is of effects = "external": set it, or leave on_doubt out')
        if self.effects == "external" and self.on_divergence == "restart":
            raise ValueError(
                'effects = "external" does not go with on_divergence = "restart": an episode that begins anew asks its tools anew; '
                'use "branch" or "fail"'
            )
        return self

    @model_validator(mode="after")
    def _chosen(self) -> DataSection:
        for name, low, high in (
            ("filter_mean", self.filter_mean_min, self.filter_mean_max),
            ("curriculum", self.curriculum_min, self.curriculum_max),
        ):
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"{name}_min <= {name}_max must hold ({low:g}, {high:g}): else nothing is trained"
                )
        if self.has_curriculum and (
            self.environment or self.episodes_of or (self.task == "sort" and not self.sets)
        ):
            what = (
                "an environment's tasks"
                if self.environment or self.episodes_of
                else 'task = "sort", whose prompts never come again'
            )
            raise ValueError(
                f"curriculum_min and curriculum_max are of rows of files, not of {what}: leave them out"
            )
        if not self.has_curriculum and (
            said := {"curriculum_solved_at", "curriculum_rest"} & self.model_fields_set
        ):
            stated = sorted(
                key for key in said if getattr(self, key) != DataSection.model_fields[key].default
            )
            if stated:
                raise ValueError(
                    f"{stated[0]} is of a curriculum: set curriculum_min or curriculum_max, or leave it out"
                )
        return self

    @property
    def has_curriculum(self) -> bool:
        """Whether prompts are chosen by their measured pass rates."""
        return self.curriculum_min is not None or self.curriculum_max is not None

    @model_validator(mode="after")
    def _path(self) -> DataSection:
        if self.sets and self.path is not None:
            raise ValueError("sets have paths of their own: leave out path, or make it one of the sets")
        names = [one.name for one in self.sets]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sets: two are named {doubled[0]!r}; give one of them another name")
        if self.task != "sort" and self.path is None and not self.sets:
            raise ValueError(f'task = "{self.task}" needs data.path')
        return self


class SamplingSection(Section):
    """How completions are sampled."""

    max_tokens: Positive
    """Tokens of one completion at most, over all engines that generate it. Must be below
    `model.context_length`."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature. The trainer computes its logprobs at the same temperature. At most 2 with
    `engine.name = "vllm"`, which takes no higher one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Below 1 it needs `allow_truncated`."""
    top_k: NonNegative = 0
    """Sampling from the k most probable tokens. 0: off. Above 0 it needs `allow_truncated`."""
    stop_token_ids: Annotated[tuple[int, ...], Allowed("list of token ids")] = ()
    """Tokens that end a completion. The sampled one belongs to the completion and is trained. Empty: the
    model's `eos_token_id`."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Allowed("list of texts of 1 to 256 characters"),
    ] = ()
    """Texts that end a completion, matched over the whole completion, whichever engines generated it. The
    token that completes such a text is the last. The model's `tokenizer.json` (64 MiB at most) then goes to
    engines with the weights."""
    min_tokens: NonNegative = 0
    """Tokens of the whole completion before which no stop token is drawn and no stop text ends it. At most
    `max_tokens`. Above 0 it needs `allow_truncated`."""
    allow_truncated: bool = False
    """Accepts that `top_p`, `top_k` or `min_tokens` make the sampling distribution differ from the trained
    one. The metrics `mismatch_*` show the difference."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2), Allowed("0")] = 0.0
    """Any other value is refused: an engine that continues a migrated sample would count its tokens anew."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), Allowed("0")] = 0.0
    """Any other value is refused, for the same reason."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10), Allowed("1")] = 1.0
    """Any other value is refused: the trainer does not compute its distribution."""

    @model_validator(mode="after")
    def _truncation(self) -> SamplingSection:
        if (self.top_p < 1 or self.top_k > 0 or self.min_tokens > 0) and not self.allow_truncated:
            raise ValueError(
                "top_p < 1, top_k > 0 or min_tokens > 0 makes the sampling distribution differ from the trained one; "
                "set allow_truncated = true to accept that (the mismatch is reported)"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must not exceed max_tokens")
        return self

    @model_validator(mode="after")
    def _penalties(self) -> SamplingSection:
        if self.presence_penalty or self.frequency_penalty:
            raise ValueError(
                "presence_penalty and frequency_penalty count the tokens of one request: an engine that goes on with a moved sample would "
                "count anew, so that moves would change what is sampled; leave them at 0"
            )
        if self.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty makes a token's distribution depend on which came before; the trainer does not compute it"
            )
        return self


class EngineSection(Section):
    """The rollout engine, reserved and harvested ([engines.md](engines.md))."""

    name: Literal["reference", "vllm"] = "reference"
    """The rollout engine: `vllm`, or `reference` for small models, tests and deterministic runs."""
    max_batch: Positive = 64
    """Samples that one engine generates at once."""
    pace: Annotated[float, Field(ge=0)] = 0.0
    """Tokens a second at most, for each sample (with `speculation`: passes). 0: no bound. It slows a toy model down
    to a large one's speed."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """vLLM: share of each GPU's memory that an engine takes for weights and cache. Reserved engines share
    their GPUs with the trainer: both must fit."""
    eager: bool = False
    """vLLM: `true` means no compilation and no CUDA graphs. Engines start sooner and generate slower. Without
    a GPU it is always so."""
    speculation: Literal["none", "group"] = "none"
    """`group`: what a sample's siblings said are its drafts, which the engine verifies several tokens at a time
    ([engines.md](engines.md#grouped-speculation)). The reference engine's tokens stay the same; vLLM's have the same
    distribution."""
    move_kv: bool = False
    """`true`: a sample that moves takes its KV blocks along, and an agent's turn goes on from those of the turn before, where their
    transfer is predicted to be quicker than a prefill ([engines.md](engines.md#kv-blocks-that-move)). Blocks that do not come, or are
    not just those, are prefilled."""
    vllm: dict[str, JsonValue] = {}
    """vLLM: any other engine argument, by its Python name. Refused are those that the run or its job decides.
    Harvested engines take numbers, switches and plain names, and what the admin allows besides
    (`harvest.vllm_options`)."""
    pause: Annotated[Literal["abort", "keep"], Allowed('`"abort"`')] = "abort"
    """What becomes of unfinished samples when an engine gets other weights. `"keep"`, with which vLLM would
    continue them, is refused: a sample carries one version."""

    @model_validator(mode="after")
    def _vllm(self) -> EngineSection:
        if found := engine_options.fault(self.vllm, harvested=False):
            raise ValueError("; ".join(found))
        engine_options.encode(self.vllm)
        return self

    @model_validator(mode="after")
    def _pause(self) -> EngineSection:
        if self.pause == "keep":
            raise ValueError(
                'engine.pause = "keep" would finish a sample with other weights than began it, and every token of a sample carries one '
                'version; leave it at "abort": what was generated stays, and another engine goes on with the same version'
            )
        return self


Function = Annotated[str, Allowed('`"module:function"`')]
FiniteWeight = Annotated[float, Field(allow_inf_nan=False)]


class RewardFunction(Section):
    """One of several reward functions. The reward is their weighted sum
    ([rewards.md](rewards.md))."""

    function: Function
    """As `reward.function`."""
    name: PartName | None = None
    """Name of its metric, `reward_<name>`. None: the function's own name."""
    weight: FiniteWeight = 1.0
    """Its weight in the sum."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the function."""

    @property
    def part(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class RewardSection(Section):
    """The reward of a completion ([rewards.md](rewards.md))."""

    function: Function = "trainer.tasks.sort:reward"
    """Called as `function(prompt, completion, meta)` in a process of its own; returns a number, or a dict of
    parts. Its module is found in `path`, or by the trainer's Python."""
    path: Path = Path(".")
    """Folder in which modules of reward functions are looked for first. By default the one of this file."""
    version: Annotated[str, Field(max_length=256)] = ""
    """Recorded with each reward. After a restart a recorded reward is used again only if its version is the
    same. Empty: the function's name and a hash of its module's file. Set it where other files or a remote
    judge decide too."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the function, as JSON can hold them. They are part of its version."""
    functions: Annotated[tuple[RewardFunction, ...], Allowed("tables `[[reward.functions]]`")] = ()
    """Several functions, in place of `function` and `options`: see [below](#rewardfunctions)."""
    weights: dict[PartName, FiniteWeight] = {}
    """Weights of the parts, by name, of a function that returns a dict. Empty: 1 each. Otherwise every part
    needs one."""
    timeout_s: Seconds = 10.0
    """Seconds that one call may take. Then its process is killed; an `async def` call is cancelled."""
    start_timeout_s: Seconds = 120.0
    """Seconds that the import of the function may take, with all that it loads."""
    memory_gb: Annotated[float, Field(ge=0)] = 4.0
    """Memory (GiB) that the process, and each one it starts, may take beyond what it has after the import. A
    call that needs more fails. 0: no bound."""
    retries: NonNegative = 2
    """Further tries after an error or a timeout."""
    processes: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that call the function side by side, beside training; each of several functions has so many.
    They start when there is work. 0: the CPUs of the job on the trainer's first node, at most 8."""
    concurrency: Annotated[int, Field(gt=0, le=1024)] = 64
    """Calls of an `async def` function at once, in its one process."""
    on_reward_error: Literal["stop", "mask"] = "stop"
    """What happens when every try failed. `stop`: the run stops. `mask`: the sample is left out of training;
    the log and the ledger (`masked`) name it, and the step's `samples` is smaller. A failure is never a
    reward of 0, except at a deadline of `trainer.verifiers:math` and `regex`."""

    @model_validator(mode="after")
    def _functions(self) -> RewardSection:
        if self.functions and self.model_fields_set & {"function", "options"}:
            raise ValueError("functions stands in the place of function and options: leave these two out")
        names = [one.part for one in self.functions]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"functions: two are named {doubled[0]!r}; give one of them another name")
        return self


class AlgorithmSection(Section):
    """The loss and its data ([algorithms.md](algorithms.md), where each algorithm's own defaults are)."""

    name: Literal[
        "grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"
    ] = "grpo"
    """The algorithm: its advantage, its surrogate and the defaults of the keys below."""
    aggregation: Literal["", "token", "sequence", "constant"] = ""
    """How token losses are averaged over the step. Empty: the algorithm's own."""
    scale_by_std: bool | None = None
    """`false`: advantages are centred rewards, not divided by their deviation. None: the algorithm's own."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """The policy ratio is clipped below 1 - `clip_low`. None: the algorithm's own."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """The policy ratio is clipped above 1 + `clip_high`. None: the algorithm's own."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term."""
    kl_estimator: Literal["", "k1", "k2", "k3"] = ""
    """Estimator of the KL term. Empty: the algorithm's own."""
    kl_reference: Literal["start", "proximal"] = "start"
    """`start`: KL against the model at `model.path`, which then stays in memory too. `proximal`: KL against
    the weights at the step's start, which costs nothing and needs `updates_per_step` above 1."""
    importance: Literal["truncate", "mask", "off"] = "truncate"
    """What is done with the ratio trainer/engine of each sampled token's probabilities. `truncate`: a weight
    of at most `importance_cap`. `mask`: a weight that is 0 outside `importance_floor` and `importance_cap`.
    `off`: nothing."""
    allow_uncorrected: bool = False
    """`true`: trains off policy without the correction, for a control run that measures what the correction is worth. `importance = "off"`
    with `max_off_policy_steps` above 0 is refused without it."""
    router_replay: bool = False
    """`true`, of a mixture of experts: engines tell which experts each generated token went to, and the
    trainer sends it to the same ones. A token then takes layers x experts a token more bytes. Needs
    `trainer.context_parallel = 1`, with vLLM `engine.eager` ([engines.md](engines.md#router-replay))."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: each token's, its sample's (the product), or its sample's geometric mean."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest ratio trainer/engine."""
    importance_floor: Annotated[float, Field(ge=0)] = 0.0
    """Smallest ratio trainer/engine that `mask` keeps. Must be below `importance_cap`."""
    on_length: Literal["reward", "mask", "overlong-shape"] = "reward"
    """Completions that `sampling.max_tokens` ended. `reward`: they are trained by their reward. `mask`: they
    are not trained. `overlong-shape`: every completion's reward falls as it nears the limit."""
    overlong_buffer_tokens: NonNegative = 0
    """Last tokens before `sampling.max_tokens` over which `overlong-shape` lowers the reward by 0 to 1."""
    dynamic_sampling: bool | None = None
    """`true`: prompts whose completions all got the same reward are replaced by the next ones of the data,
    until `data.prompts_per_step` groups have rewards that differ. None: the algorithm's own (`dapo`:
    true)."""
    dynamic_limit: Annotated[float, Field(ge=1)] = 4.0
    """Groups of one step at most, as a multiple of `data.prompts_per_step`. Then the step trains what it
    has."""
    updates_per_step: Positive = 1
    """Optimizer updates of one step. The step's prompts are divided among them."""
    max_off_policy_steps: Annotated[int, Field(ge=0, le=16)] = 0
    """Optimizer steps that the weights of a sample may be older than those that train it. Above 0 samples of so many later steps are
    generated while a step is trained ([staleness.md](staleness.md)). Needs `importance` (or `allow_uncorrected`) and `run.harvest`.
    Excludes `run.deterministic` and dynamic sampling."""
    on_new_version: Literal["switch", "finish"] = "switch"
    """With `max_off_policy_steps` above 0, what an engine that generates does when there are new weights. `switch`: it gives its
    samples back, loads the weights and goes on; a quarter of the engines at a time. `finish`: it loads them once it has no sample that
    its own weights may generate."""
    kv: Literal["recompute", "keep"] = "recompute"
    """With `on_new_version = "switch"`, what becomes of an engine's KV cache when it loads new weights. `recompute`: it is dropped,
    and what samples have is prefilled again. `keep`: a sample goes on where it was and finds its own entries, which are of the weights
    that made them; nothing else finds them. Needs vLLM; the reference engine recomputes."""
    on_late: Literal["wait", "later"] = "wait"
    """With `max_off_policy_steps` above 0, what a step does that has trained all it has and waits for a few late samples. `wait`: it waits.
    `later`: the next step trains their groups, if they are within `max_off_policy_steps` then and at least half of the step is trained;
    else it waits. None is dropped either way."""

    max_staleness_kl: Annotated[float, Field(ge=0)] = 0.0
    """With `max_off_policy_steps` above 0: the run stops before it takes a step whose samples are further than this from the weights that
    train them (`mismatch_k3`, nats a token). 0: no limit."""

    @model_validator(mode="after")
    def _mask(self) -> AlgorithmSection:
        if self.max_staleness_kl and not self.max_off_policy_steps:
            raise ValueError(
                "max_staleness_kl needs max_off_policy_steps of 1 or more: else every step is on policy"
            )
        if self.on_late == "later" and not self.max_off_policy_steps:
            raise ValueError(
                'on_late = "later" needs max_off_policy_steps of 1 or more: else every step is on policy'
            )
        if self.kv == "keep" and not (self.max_off_policy_steps and self.on_new_version == "switch"):
            raise ValueError(
                'kv = "keep" needs max_off_policy_steps of 1 or more and on_new_version = "switch": else no sample meets new weights'
            )
        if self.importance_floor and self.importance != "mask":
            raise ValueError('importance_floor needs importance = "mask"')
        uncorrected = self.max_off_policy_steps > 0 and self.importance == "off"
        if uncorrected and not self.allow_uncorrected:
            raise ValueError(
                f'max_off_policy_steps = {self.max_off_policy_steps} needs the correction: importance = "truncate" or "mask". '
                "For a control run that measures what the correction is worth, set allow_uncorrected = true"
            )
        if self.allow_uncorrected and not uncorrected:
            raise ValueError(
                'allow_uncorrected = true needs importance = "off" and max_off_policy_steps of 1 or more: else there is nothing to allow'
            )
        if self.importance == "mask" and self.importance_floor >= self.importance_cap:
            raise ValueError("importance_floor < importance_cap must hold")
        return self


class LoraSection(Section):
    """Low-rank adapters, trained instead of the model's own weights ([models.md](models.md#lora-train-adapters))."""

    rank: NonNegative = 0
    """Rank of the adapters. 0: all weights are trained. Above 0 it needs the extra `[lora]`."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapters' product is scaled by `alpha / rank`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1), Allowed("names of linear layers")] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Layers that get an adapter. The output head and the embeddings are refused."""
    serve: Literal["auto", "merged", "unmerged"] = "auto"
    """Whether engines merge each version's adapters into their weights, or keep them beside their base and load A and B alone. `auto`: what
    is predicted to cost fewer seconds a version ([weights.md](weights.md#adapters)); the reference engine merges."""


class OptimizerSection(Section):
    """AdamW and its learning rate."""

    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate. `scavenger init` writes 1e-6, for all weights of a model that is trained already; adapters want ten times and more."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the warm-up's end to the run's last step."""
    final_lr_share: Share = 0.0
    """Share of `lr` that is left in the last step, unless `schedule` is constant."""
    betas: Annotated[tuple[Fraction, Fraction], Allowed("two numbers, each 0 to below 1")] = (0.9, 0.95)
    """Adam's decay rates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""


class ReservedSection(Section):
    """Engines on the training job's own GPUs."""

    workers: NonNegative = 1
    """Reserved engines that the launcher starts beside the ranks. Scavenger's own trainer needs at least 1:
    without one a run would stand still while no GPU is idle. 0 is for another trainer
    ([your-trainer.md](your-trainer.md))."""
    gpus_per_engine: Positive = 1
    """GPUs of each, on one node of the training job (vLLM: tensor parallel). A node's GPUs are dealt out in
    order, and again from the first when there are more engines than fit. GPUs left over are used by the ranks
    alone."""
    window: Share = 0.5
    """Share of a step's samples after which reserved engines sleep and training begins, if a harvested engine
    is ready. Used while the router's policy does not set the window: `router.policy = "standard"` never
    does."""
    wake_after_s: Seconds = 5.0
    """Seconds without a ready harvested engine, with samples outstanding, after which reserved engines wake
    within the step. After so many seconds with one they sleep again."""
    sleep_timeout_s: Seconds = 60.0
    """Seconds within which an engine that is to sleep must report that its memory is free; nothing is trained
    before. An engine that does not is ended (`reserved_ended` in the log and in the ledger's events), and its
    samples continue elsewhere. Must be more than an engine takes to start, where the window may close that
    early."""


class CheckpointSection(Section):
    """Checkpoints in `<out_dir>`."""

    every: Positive = 20
    """Steps between two checkpoints. The last step always makes one."""
    keep: Positive = 2
    """Newest checkpoints that are kept."""
    grace_s: Seconds = 120.0
    """Seconds that a training job waits, once it is told to end, for its ranks to write a checkpoint. The
    cluster may grant less."""


class EvalSet(Section):
    """One of several data sets to evaluate on, beside the held-out prompts of `eval.path` or `data.path`."""

    name: PartName
    """Its metrics are `eval_<name>_sampled` and so on."""
    path: Path
    """Its rows, as `data.path`. They are rendered as those are: `data.chat`, `data.system`."""
    prompts: NonNegative = 0
    """So many of its rows, chosen by `data.seed`. 0: all."""
    samples: Annotated[int, Field(gt=0, le=MAX_GROUP_SAMPLES)] | None = None
    """Completions of each prompt at temperature 1. None: as `eval.samples`."""
    task: Literal["jsonl", "parquet"] | None = None
    """File format. None: as `data.task`; JSONL where that is `sort`."""
    prompt_field: Column | None = None
    """Column of the prompt. None: as `data.prompt_field`."""
    answer_field: Column | None = None
    """Column of the reference answer. None: as `data.answer_field`."""


class EvalSection(Section):
    """Evaluation on held-out prompts."""

    every: NonNegative = 0
    """Steps between two evaluations. 0: before the first step and after the last only."""
    prompts: NonNegative = 0
    """Held-out prompts. Each gets `samples` completions at temperature 1 and one greedy completion. 0: no
    evaluation."""
    samples: Annotated[int, Field(gt=0, le=MAX_GROUP_SAMPLES)] = 1
    """Completions of each held-out prompt at temperature 1. The metrics `eval_pass_at_1`, `_2`, `_4` and so
    on up to it tell how often at least one of so many is solved."""
    solved_at: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """A completion with this reward or more counts as solved in `eval_pass_at_*`."""
    path: Path | None = None
    """Where held-out prompts come from, in the format of `data.path`. None: rows of `data.path`, which are
    then never trained on."""
    sets: Annotated[tuple[EvalSet, ...], Allowed("tables `[[eval.sets]]`")] = ()
    """Further data sets, each with metrics of its own: see [below](#evalsets)."""

    @model_validator(mode="after")
    def _sets(self) -> EvalSection:
        names = [one.name for one in self.sets]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sets: two are named {doubled[0]!r}; give one of them another name")
        if "reward" in names:
            raise ValueError("sets: none may be named 'reward': eval_reward_* are the parts of the reward")
        return self


class WeightsSection(Section):
    """How engines get each version of the weights ([weights.md](weights.md))."""

    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of the published weights. The trainer's own are float32 (`deterministic`: float64)."""
    listen: Annotated[str, Allowed("host name or IPv4 address")] = ""
    """Interface of each training rank's host that engines pull from. Empty: all of them (`0.0.0.0`), or
    `127.0.0.1` where the daemon announces a loopback address."""
    port: Annotated[int, Field(ge=0, le=65535 - 63)] = 0
    """TCP port of the first rank on each training host; each further rank on the host takes the next one. 0: the
    system chooses. Set it where a firewall stands between training and compute nodes: to another one for each
    run that may share a host."""
    advertise: Annotated[str, Allowed("host name")] = ""
    """Host name of rank 0 that engines connect to. Empty, and on other hosts: `listen`, or the host's name
    where that is all interfaces."""
    deltas: Annotated[int, Field(ge=0, le=8)] = 4
    """Engines that have one of so many last versions get only what changed since, where that is less. 0:
    always everything."""
    encrypt: bool = False
    """`true`: weights travel encrypted (CURVE). Otherwise they travel in the clear, and the run has no engines
    on further clusters; every byte is checked either way."""
    nixl: bool = False
    """`true`: engines read weights from the trainer's memory by NIXL (RDMA where the network has it). Needs
    the extra `nixl` on both sides; engines without it use TCP. Excludes `encrypt`."""
    spool_dir: Path | None = None
    """A folder that engines and all ranks see. The two newest versions are written there too, for when no
    process serves them and for `scavenger weights export`. They are in the clear, also with `encrypt`: only
    the folder's permissions protect them."""


class TrainerSection(Section):
    """How the training ranks compute, and how they are divided
    ([models.md](models.md#ranks-several-nodes-fsdp-hsdp-context-and-tensor-parallelism))."""

    replicas: Positive = 1
    """Copies of the model over the ranks (HSDP): each is sharded over its own ranks, and gradients are summed
    over all. A replica of whole nodes keeps the gathering of layers within them. Must divide the number of
    ranks."""
    context_parallel: Positive = 1
    """Ranks (with `tensor_parallel`: groups of ranks) that share the tokens of each sample, for samples too long
    for one GPU. Must divide the ranks of a replica and the model's attention heads. Above 1 it needs `packing`."""
    tensor_parallel: Positive = 1
    """Ranks that cut each layer, by the model's own plan in transformers, for layers too large for one GPU.
    Must divide the ranks of a node, and the model's attention heads, key-value heads and vocabulary."""
    micro_batch_tokens: Positive = 8192
    """Tokens of one micro-batch on one rank at most, padding included; ranks that share samples
    (`context_parallel`) have so many each. A longer sample is trained alone. Not used when `deterministic`."""
    packing: bool = True
    """`true`: samples of a micro-batch lie in one line, without padding. `false`: they are padded to the
    longest, for models whose attention cannot separate packed samples. Not used when `deterministic`."""
    share_prefixes: bool = False
    """`true`: what several samples of a micro-batch begin with (a group's prompt, the turns that branches of an episode
    share) is computed once ([models.md](models.md#shared-prefixes-trainershare_prefixes)). Needs `packing` and
    `context_parallel = 1`, and goes with no `algorithm.router_replay`. Not used when `deterministic`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which layers compute; master weights, gradient sums and the optimizer are float32 in any case.
    `auto`: bfloat16 on a GPU, else float32. Not used when `deterministic`."""
    activation_checkpointing: bool = False
    """`true`: activations are computed again in the backward pass instead of kept."""
    offload: Literal["auto", "never", "always"] = "auto"
    """Whether master weights, gradients and optimizer state go to pinned host memory while reserved engines
    generate, and return layer by layer as they are used. `auto`: on a GPU whose memory does not hold them
    beside what its engines take; the log says why (`trainer.offload`). Needs host memory for 12 bytes a
    trained parameter of each rank's share, and 4 more for gradients of a step under way."""
    head_chunk_tokens: NonNegative = 1024
    """Tokens whose logits are in memory at once, in the type of the layers and in float32; they are computed
    again in the backward pass. `0`: logits of the whole micro-batch, for models whose output head cannot be cut.
    Not used when `deterministic`."""
    idle_poll_ms: Annotated[float, Field(ge=1, le=1000)] = 5.0
    """Milliseconds between two polls of a rank that waits for rank 0."""
    stuck_s: Seconds = 300.0
    """Seconds after which the watchdog names a rank that is still at one command, or gives no sign of life.
    Waiting for samples is no command."""
    stuck_end_s: Seconds = 1800.0
    """Seconds after which such a rank ends the job, with status 75; `scripts/train.sbatch` then requeues it.
    At least `stuck_s`."""

    @model_validator(mode="after")
    def _division(self) -> TrainerSection:
        if self.context_parallel > 1 and not self.packing:
            raise ValueError(
                "context_parallel > 1 needs packing = true: the samples' borders say who sees whom; set one of them"
            )
        if self.share_prefixes and (not self.packing or self.context_parallel > 1):
            raise ValueError(
                "share_prefixes = true needs packing = true and context_parallel = 1: a prefix is once in one rank's line; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _stuck(self) -> TrainerSection:
        if self.stuck_s > self.stuck_end_s:
            raise ValueError("stuck_s <= stuck_end_s must hold")
        return self


class MonitorSection(Section):
    """Where a step's metrics go, beside `<out_dir>/metrics.jsonl` and standard output."""

    sample_groups: NonNegative = 2
    """About so many groups of each step and of each evaluation: their prompts, completions and rewards are
    appended to `<out_dir>/samples.jsonl` (mode 0600). 0: none. The ledger has all of them (`scavenger
    samples`)."""
    tensorboard: bool = False
    """`true`: metrics go to `<out_dir>/tensorboard` too (extra `[tensorboard]`)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (extra `[wandb]`). `offline` writes to `<out_dir>/wandb`, for `wandb sync` later. The
    key comes from `wandb login`, never from this file. W&B gets this file's settings without `run.key`,
    `reward.options`, `data.chat_options` and `data.environment_args`, which may hold secrets."""
    wandb_project: Annotated[str, Field(min_length=1, max_length=128)] = "scavenger"
    """W&B's project. The W&B run is `run.name`, for all attempts; that of tries with `--local` is `<run.name>-local`."""
    wandb_entity: str = ""
    """W&B's team. Empty: the user's own."""
    mlflow: str = ""
    """URI of an MLflow tracking server, `http://HOST:PORT` (extra `[mlflow]`). Empty: none. MLflow gets what W&B gets; a
    token comes from `MLFLOW_TRACKING_TOKEN`, never from this file. One MLflow run for all attempts: its tag `scavenger.run`
    is `run.name`, that of tries with `--local` `<run.name>-local`."""
    mlflow_experiment: Annotated[str, Field(min_length=1, max_length=128)] = "scavenger"
    """MLflow's experiment. It is made where it does not exist."""
    token_differences: Share = 0.05
    """Of which share of a step's groups the ledger keeps how far trainer and engine are apart at each token: `scavenger web`
    marks them in the text ([web.md](web.md)). At least one group a step; which ones follows from the seed. 1: all; 0: none. Each of
    their tokens costs 2 bytes, beside the 13 that the ledger has of any."""
    mismatch_alarm: Annotated[float, Field(ge=0)] = 0.02
    """The log warns of a step whose `mismatch_k3` (the mean of trainer against engines) is above this
    ([metrics.md](metrics.md)). 0: never."""


class RunConfig(Section):
    """A run's file. `scripts/train.sbatch` (`python -m trainer.launch`) and every rank (`python -m trainer`)
    read it."""

    run: RunSection
    daemon: EmbeddedSection = EmbeddedSection()
    model: ModelSection
    data: DataSection = DataSection()
    sampling: SamplingSection
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()
    reserved: ReservedSection = ReservedSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    weights: WeightsSection = WeightsSection()
    trainer: TrainerSection = TrainerSection()
    monitor: MonitorSection = MonitorSection()

    @property
    def other_policies(self) -> tuple[str, ...]:
        """Names of the other runs that answer for agents of this run's environment."""
        return tuple(sorted({one.run for one in self.data.policies.values()} - {self.run.name}))

    @model_validator(mode="after")
    def _policies(self) -> RunConfig:
        if self.run.steps == 0 and not self.data.episodes_of:
            raise ValueError(
                "run.steps = 0 is of a run that only answers for an agent: set data.episodes_of, or take steps"
            )
        if self.data.episodes_of == self.run.name:
            raise ValueError("data.episodes_of names this run itself: name the run that plays the episodes")
        if self.data.episodes_of and self.eval.prompts:
            raise ValueError(
                "eval.prompts does not go with data.episodes_of: the run that plays the episodes evaluates them"
            )
        return self

    @model_validator(mode="after")
    def _episodes(self) -> RunConfig:
        if not (self.data.environment or self.data.episodes_of):
            return self
        if self.reward.model_fields_set & {"function", "functions", "options"}:
            raise ValueError(
                "data.environment rewards its episodes itself: leave out reward.function, functions and options"
            )
        if self.algorithm.on_length == "overlong-shape":
            raise ValueError(
                'algorithm.on_length = "overlong-shape" is of single completions: with data.environment use "reward" or "mask"'
            )
        if self.algorithm.router_replay:
            raise ValueError(
                "algorithm.router_replay does not go with data.environment: turns carry no experts"
            )
        if self.eval.path is not None or self.eval.sets:
            raise ValueError(
                "eval.path and eval.sets are of files: with data.environment held-out tasks are the task set's own"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.sampling.max_tokens >= self.model.context_length:
            raise ValueError(
                f"sampling.max_tokens must be below model.context_length ({self.sampling.max_tokens}, {self.model.context_length}): the "
                "prompt needs room; set both"
            )
        if self.engine.name == "vllm" and self.sampling.temperature > MAX_VLLM_TEMPERATURE:
            raise ValueError(
                f'engine.name = "vllm" needs sampling.temperature <= {MAX_VLLM_TEMPERATURE}: vLLM takes no higher one'
            )
        if self.run.deterministic and self.engine.name != "reference":
            raise ValueError(
                'run.deterministic = true needs engine.name = "reference": no other engine computes in float64'
            )
        trainer = self.trainer
        if (
            self.run.deterministic
            and max(trainer.replicas, trainer.context_parallel, trainer.tensor_parallel) > 1
        ):
            raise ValueError(
                "run.deterministic = true needs trainer.replicas = 1, trainer.context_parallel = 1 and trainer.tensor_parallel = 1: sums "
                "are exact only where each micro-batch is one rank's"
            )
        if self.run.deterministic and self.algorithm.max_off_policy_steps:
            raise ValueError(
                "run.deterministic = true needs algorithm.max_off_policy_steps = 0: "
                "after a restart samples come from newer weights than they would have without it"
            )
        if self.data.replay_groups:
            self._replays_groups()
        if not self.run.harvest and self.algorithm.max_off_policy_steps:
            raise ValueError(
                "algorithm.max_off_policy_steps > 0 needs run.harvest = true: on the trainer's own GPUs no engine generates while it trains"
            )
        if not self.run.harvest and self.reserved.workers == 0:
            raise ValueError(
                "run.harvest = false needs reserved.workers >= 1: without harvested engines reserved ones must generate"
            )
        if self.algorithm.kv == "keep" and self.engine.vllm.get("enable_prefix_caching") is False:
            raise ValueError(
                'algorithm.kv = "keep" needs engine.vllm.enable_prefix_caching: leave that option out'
            )
        if self.run.nodes_per_engine > 1:
            self._spans_nodes()
        if self.run.share_engines:
            self._shares_engines()
        if self.algorithm.router_replay:
            self._replays()
        if self.engine.speculation != "none" and self.engine.name == "vllm":
            self._speculates()
        if (
            self.engine.vllm.get("quantization")
            and self.engine.name == "vllm"
            and self.algorithm.importance == "off"
        ):
            raise ValueError(
                'engine.vllm.quantization needs algorithm.importance = "truncate" or "mask": a quantised engine samples from another '
                "distribution than the one that is trained"
            )
        if self.weights.nixl and self.weights.encrypt:
            raise ValueError(
                "weights.nixl reads memory in the clear, which weights.encrypt forbids: set one of them"
            )
        return self

    def _replays_groups(self) -> None:
        if not self.algorithm.max_off_policy_steps:
            raise ValueError(
                f"data.replay_groups = {self.data.replay_groups} needs algorithm.max_off_policy_steps of 1 or more: a group of an earlier "
                "step is a step old at least"
            )
        if self.data.environment or self.data.episodes_of:
            raise ValueError(
                "data.replay_groups does not go with data.environment: episodes are trained once"
            )

    def _spans_nodes(self) -> None:
        nodes, stages = self.run.nodes_per_engine, self.engine.vllm.get("pipeline_parallel_size", 1)
        if self.engine.name != "vllm":
            raise ValueError(
                f'run.nodes_per_engine = {nodes} needs engine.name = "vllm": the {self.engine.name} engine computes on one node'
            )
        if self.lora.rank and self.lora.serve == "unmerged":
            raise ValueError(
                f'run.nodes_per_engine = {nodes} needs lora.serve = "merged": adapters are put beside their base on one node only'
            )
        if isinstance(stages, int) and stages > 0 and self.run.engine_gpus % stages:
            raise ValueError(
                f"engine.vllm.pipeline_parallel_size = {stages} must divide the engine's {self.run.engine_gpus} GPUs "
                f"(run.nodes_per_engine = {nodes} nodes of run.gpus_per_engine = {self.run.gpus_per_engine})"
            )

    def _shares_engines(self) -> None:
        """What one sample left must be found by no other, and weights are of all runs that share."""
        needs = (
            (
                self.lora.rank > 0,
                "lora.rank above 0: what runs share is the base, beside which each has its adapters",
            ),
            (self.lora.serve == "unmerged", 'lora.serve = "unmerged"'),
            (self.run.isolation == "memory", 'run.isolation = "memory"'),
            (self.run.nodes_per_engine == 1, "run.nodes_per_engine = 1"),
            (self.engine.speculation == "none", 'engine.speculation = "none"'),
            (not self.engine.move_kv, "engine.move_kv = false"),
            (self.algorithm.kv == "recompute", 'algorithm.kv = "recompute"'),
            (not self.algorithm.router_replay, "algorithm.router_replay = false"),
        )
        for met, what in needs:
            if not met:
                raise ValueError(f"run.share_engines = true needs {what}")

    def _speculates(self) -> None:
        """What vLLM does not do together with drafts, or was never seen to do."""
        off = 'set engine.speculation = "none"'
        if "speculative_config" in self.engine.vllm:
            raise ValueError(
                "engine.speculation and engine.vllm.speculative_config are both set; remove one of them"
            )
        if self.engine.vllm.get("async_scheduling"):
            raise ValueError(
                f"engine.vllm.async_scheduling and engine.speculation: vLLM does not do both; {off}"
            )
        if self.algorithm.router_replay:
            raise ValueError(
                f"algorithm.router_replay = true, and engine.speculation: vLLM tells no experts then; {off}"
            )
        if self.run.engine_gpus > 1 or self.reserved.gpus_per_engine > 1:
            raise ValueError(f"engine.speculation with vLLM is for engines of one GPU; {off}")

    def _replays(self) -> None:
        if self.trainer.share_prefixes:
            raise ValueError(
                "algorithm.router_replay = true needs trainer.share_prefixes = false: samples that share a token may have sent it to "
                "different experts"
            )
        if self.trainer.context_parallel > 1:
            raise ValueError(
                "algorithm.router_replay = true needs trainer.context_parallel = 1: recorded experts are not cut over ranks"
            )
        if self.engine.name != "vllm":
            return
        if not self.engine.eager:
            raise ValueError(
                "algorithm.router_replay = true needs engine.eager = true: inside CUDA graphs vLLM's choice of experts is not seen"
            )
        for option in engine_options.ROUTING_FORBIDS:
            if self.engine.vllm.get(option, 1) not in (1, None, False):
                raise ValueError(
                    f"algorithm.router_replay = true, and engine.vllm.{option}: no engine tells experts then; remove one of them"
                )
