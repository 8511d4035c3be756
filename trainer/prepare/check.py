"""What would stop a run, told before any job is submitted: `scavenger init --check`. Changes and submits nothing.

Owns the order of the checks and their words; each asks the part that the run itself would ask. One that fails does not hide the next,
unless that needs what the first did not get.
Boundary: one subcommand option, `scavenger init --check`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scavenger import config as configs
from scavenger.config import RunConfig
from scavenger.errors import ConfigError, ScavengerError, StartFinding
from scavenger.protocol import engine_options, keys
from scavenger.sizing import engine as engine_sizes
from scavenger.sizing import fit, phases
from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import GB, TrainJob
from scavenger.weights import files, manifest
from trainer import embedded, reserved
from trainer.data.prompts import PromptSource, PromptTask, open_tokenizer, stop_tokens, unknown_note
from trainer.model.mesh import Division, check_nodes, divide
from trainer.prepare import model as models
from trainer.prepare import weights
from trainer.prepare.draft import shape_of
from trainer.prepare.model import ModelFacts
from trainer.serving import refuse_missing_engine

#: A vocabulary may be padded, but a tokenizer of less than half the model's is another model's.
LEAST_SHARE = 0.5
PROBES = 3
#: A parameter's float32 master and its two moments.
CHECKPOINT_NBYTES = 12
DIRECTIVE = re.compile(
    r"^#SBATCH\s+--(nodes|ntasks|gpus-per-node)[= ](?:[A-Za-z][\w-]*:)?(\d+)|^# (gpu|node)-memory-gb=([\d.]+)"
    r"|^#SBATCH\s+--mem[= ](\d+)([KMGT]?)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class RequestedGpus:
    """What the job asks for. `gb`: of one GPU, `node_gb`: of a node's host memory, `node_has_gb`: what it has; 0 = not known.
    `one_rank_stated`: the script says that there is one.
    """

    ranks: int
    per_node: int
    gb: float
    nodes: int = 1
    node_gb: float = 0.0
    node_has_gb: float = 0.0
    one_rank_stated: bool = False

    @property
    def ranks_told(self) -> bool:
        """Whether the job's script says how many ranks there are: 1 is also what is taken where it does not."""
        return self.ranks > 1 or self.per_node > 0 or self.one_rank_stated


@dataclass(slots=True)
class _Seen:
    """What earlier checks found, for later ones."""

    model: ModelFacts | None = None
    tokenizer: Tokenizer | None = None
    prompts: list[PromptTask] = field(default_factory=list)
    held_out: list[PromptTask] = field(default_factory=list)
    longest: int = 0  # tokens of the longest prompt, 0 = not known
    division: Division | None = None
    said: list[str] = field(default_factory=list)


def gpus_of(script: str) -> RequestedGpus:
    """From the text of a train.sbatch. Pure."""
    found = {"nodes": 1.0, "ntasks": 0.0, "gpus-per-node": 0.0, "gpu": 0.0, "node": 0.0, "mem": 0.0}
    for name, number, noted, gb, mem, unit in DIRECTIVE.findall(script):
        found[name or noted or "mem"] = float(number or gb or _nbytes(mem, unit) / GB)
    per_node = int(found["gpus-per-node"])
    return RequestedGpus(
        int(found["ntasks"]) or max(1, int(found["nodes"]) * per_node),
        per_node,
        found["gpu"],
        int(found["nodes"]),
        found["mem"],
        found["node"],
        found["ntasks"] == 1,
    )


def _nbytes(number: str, unit: str) -> int:
    """As Slurm reads `--mem`: mebibytes where there is no unit."""
    return int(number) << {"K": 10, "M": 20, "": 20, "G": 30, "T": 40}[unit]


def host_of(run_toml: Path) -> dict[str, int]:
    """Keys of the daemon's [harvest]: what the job of one of this run's engines needs of its host. Raises `ConfigError`."""
    config = configs.read_run(run_toml)
    facts = models.read_facts(config.model.path)
    version, gpus = weights.version_of(config, facts), config.run.gpus_per_engine
    mb = -(-engine_sizes.engine_host_mb(version, config.engine.name, gpus) // 1024) * 1024
    return {"cpus_per_engine": engine_sizes.engine_cpus(version, gpus), "memory_mb_per_engine": mb}


#: The check that a try with `--local` does without.
DAEMON = "daemon and keys"
ENVIRONMENT, EPISODES = "environment", "episodes"


def check(
    run_toml: Path, gpus: RequestedGpus, over: Sequence[Path] = (), sets: Sequence[str] = ()
) -> Iterator[StartFinding]:
    """Every check of the run in `run_toml`, with what is laid over it, in order."""
    seen = _Seen()
    try:
        config = configs.read_run(run_toml, over, sets)
    except ScavengerError as error:
        yield StartFinding("run.toml", str(error))
        return
    yield StartFinding(
        "run.toml",
        note=f"run {config.run.name}, {config.run.steps} steps of {config.data.prompts_per_step} prompts",
    )
    yield _ask("model", lambda: _model(config, seen))
    yield _ask("tokenizer", lambda: _tokenizer(config, seen), seen.model)
    if config.data.environment:
        yield _ask(ENVIRONMENT, lambda: _environment(config, seen), seen.tokenizer)
    elif config.data.episodes_of:
        yield StartFinding(EPISODES, note=f"run {config.data.episodes_of} plays them")
    else:
        yield _ask("data and prompts", lambda: _data(config, seen), seen.tokenizer)
        yield _ask("reward", lambda: _reward(config, seen), seen.prompts or None)
    yield _ask("algorithm", lambda: _algorithm(config))
    yield _ask("adapters", lambda: weights.check_adapters(config), seen.model)
    yield _ask("ranks", lambda: _ranks(config, seen, gpus), seen.model)
    yield _ask("engine", lambda: _engine(config), seen.model)
    yield _ask("reserved engines", lambda: _reserved(config, gpus))
    yield _ask("memory of the GPUs", lambda: _memory(config, seen, gpus), seen.division)
    yield _ask("weights", lambda: _weights(config, seen, gpus), seen.model)
    yield _ask("out_dir and figures", lambda: _out_dir(config, seen.model))
    yield _ask(DAEMON, lambda: _daemon(config))


def _ask(what: str, function: Callable[[], str], needs: object = True) -> StartFinding:
    if needs is None:
        return StartFinding(what, note="not looked at: it needs what was refused above", skipped=True)
    try:
        return StartFinding(what, note=function())
    except ScavengerError as error:
        return StartFinding(what, str(error))


def _model(config: RunConfig, seen: _Seen) -> str:
    facts = models.read_facts(config.model.path)
    from trainer.model import sharded_load  # seconds of imports: only where the folder is one
    from trainer.prepare import engines

    engines.check_buildable((config.model.path / "config.json").read_text())
    sharded_load.check(config.model.path)
    if facts.context and config.model.context_length > facts.context:
        raise ConfigError(
            f"model.context_length = {config.model.context_length}, the model was made for {facts.context} tokens",
            f"set model.context_length = {facts.context} or lower",
        )
    if config.run.deterministic and shape_of(facts).experts:
        raise ConfigError(
            "run.deterministic = true computes in float64, which transformers' experts do not",
            "set run.deterministic = false, or train a model without experts",
        )
    seen.model = facts
    return f"{facts.architecture}, {facts.parameters / 1e6:.2f} M parameters, {facts.vocabulary} tokens"


def _tokenizer(config: RunConfig, seen: _Seen) -> str:
    assert seen.model is not None
    facts, tokenizer = seen.model, open_tokenizer(config.model.path)
    size, remedy = (
        tokenizer.get_vocab_size(with_added_tokens=False),
        "copy tokenizer.json and config.json from the same model",
    )
    if size > facts.vocabulary or tokenizer.get_vocab_size() < LEAST_SHARE * facts.vocabulary:
        where = facts.folder / "tokenizer.json"
        raise ConfigError(
            f"the tokenizer does not match the model: {where} has {size} tokens, the model {facts.vocabulary}",
            remedy,
        )
    ends = stop_tokens(config.model.path, config.sampling.stop_token_ids)
    strange = [token for token in ends if token >= facts.vocabulary or tokenizer.id_to_token(token) is None]
    if strange:
        raise ConfigError(
            f"token {strange[0]} is to end a completion, and the tokenizer has no such token", remedy
        )
    _own_end(config, tokenizer, ends)
    if config.sampling.stop:
        files.read_tokenizer(config.model.path)  # what is published has a bound
    seen.tokenizer = tokenizer
    return f"completions end with {', '.join(f'{token} ({tokenizer.id_to_token(token)})' for token in ends)}"


def _own_end(config: RunConfig, tokenizer: Tokenizer, ends: tuple[int, ...]) -> None:
    """The tokenizer names an end of its own: unless it ends completions, every completion would run into the length limit."""
    path = config.model.path / "tokenizer_config.json"
    if config.sampling.stop_token_ids or not path.is_file():
        return
    named = models.read_json(path, "save the model's tokenizer again").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    token = tokenizer.token_to_id(text) if text else None
    if text and token not in ends:
        raise ConfigError(
            f"the tokenizer ends texts with {text!r} ({'no token of its' if token is None else f'token {token}'}), "
            f"the model's configuration with {', '.join(map(str, ends))}",
            "copy tokenizer and generation_config.json from the same model, or set sampling.stop_token_ids",
        )


def _data(config: RunConfig, seen: _Seen) -> str:
    assert seen.tokenizer is not None
    assert seen.model is not None
    prompts = PromptSource(config, seen.tokenizer, seen.said.append)
    seen.prompts = prompts.take(0, max(PROBES, config.data.prompts_per_step))
    held_out = [task for one in prompts.evaluations for task in one.prompts]
    worst = max(
        (token for prompt_task in (*seen.prompts, *held_out) for token in prompt_task.tokens), default=0
    )
    if worst >= seen.model.vocabulary:
        raise ConfigError(
            f"a prompt holds token {worst}, the model has {seen.model.vocabulary}",
            "the tokenizer is another model's",
        )
    seen.held_out = held_out
    if note := unknown_note(seen.tokenizer, [*seen.prompts, *held_out]):
        seen.said.append(note)
    longest = max(len(prompt_task.tokens) for prompt_task in (*seen.prompts, *held_out))
    seen.longest = prompts.longest
    return "; ".join(
        [
            *seen.said,
            f"prompts of the first step have up to {longest} tokens, {len(held_out)} prompts are held out",
        ]
    )


def _environment(config: RunConfig, seen: _Seen) -> str:
    """Load it in a worker, as the run will, and play one episode with a model that says a few words."""
    from trainer.episodes import gateway
    from trainer.episodes.opening import rehearsed

    gateway.refuse_missing()
    tokenizer = seen.tokenizer
    assert tokenizer is not None
    tasks, played, roles = rehearsed(
        config, tokenizer.encode("No.", add_special_tokens=False).ids, seen.said.append
    )
    prompts = PromptSource(config, tokenizer, seen.said.append, tasks)
    seen.prompts = prompts.take(0, config.data.prompts_per_step)
    turns, rows = len(played.calls), len(played.branches)
    agents = (
        f"; agents: {', '.join(f'{role} ({runtime})' for role, runtime in roles.items())}" if roles else ""
    )
    said = (
        f"{tasks.count or 'endless'} tasks{agents}; an episode with a stub model had {turns} turn{'s' * (turns != 1)} in "
        f"{played.seconds:.1f} s, {rows} row{'s' * (rows != 1)} to train and a reward of {played.reward:g}"
    )
    return "\n".join([said, *episode_warnings(config.data.sandbox, roles, played.agents, rows, turns)])


def episode_warnings(sandbox: str, roles: Mapping[str, str], agents: int, rows: int, turns: int) -> list[str]:
    """What to look at, though nothing stops the run: programs without a sandbox, and histories that do not go on. Pure.

    `roles`: agents with their runtimes. `agents`: that trained in the episode, 0 = not known; `rows`, `turns`: of theirs.
    """
    found = []
    plain = [role for role, runtime in roles.items() if runtime == "subprocess"]
    if plain and sandbox == "none":
        found.append(
            f"LOOK, without a sandbox the programs of {', '.join(plain)}, such as a shell, run as you, with your files: set "
            'data.sandbox = "bubblewrap" (docs/agents.md)'
        )
    if agents and rows > agents:
        found.append(
            f"LOOK, {rows} rows of {turns} turns, of {agents} agent{'s' * (agents != 1)}: the harness writes its history anew, and "
            "each row repeats its prompt in training (docs/environments.md, which harness)"
        )
    return found


def _reward(config: RunConfig, seen: _Seen) -> str:
    """Call it as the run will: with no completion, with the row's own answer, with a wrong one."""
    from trainer.algorithms.reward_pool import open_pool, refuse_missing

    for prompt_task in (seen.prompts[0], *seen.held_out):
        refuse_missing(config.reward, prompt_task.meta)
    found = []
    assert seen.tokenizer is not None
    with open_pool(config.reward, retries=0, processes=1) as runner:
        for prompt_task in seen.prompts[:PROBES]:
            prompt = seen.tokenizer.decode(list(prompt_task.tokens), skip_special_tokens=True)
            for completion in (str(prompt_task.meta.get("answer", "")), "", "no"):
                found.append(runner.score(prompt, completion, prompt_task.meta))
    if not any("answer" in prompt_task.meta for prompt_task in seen.prompts):
        return f"rows have no answers; empty and wrong completions get {min(found):g} to {max(found):g}"
    own = found[0::3]
    said = f"the rows' own answers get {', '.join(f'{value:g}' for value in own)}"
    return (
        said
        if max(found) > min(found)
        else f"{said}, as do wrong ones: LOOK whether the function can tell completions apart"
    )


def _algorithm(config: RunConfig) -> str:
    from trainer.algorithms.rows import resolve

    resolve(config.algorithm, config.sampling.max_tokens)
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError("lora.rank needs peft", "install it: pip install 'scavenger[lora]'")
    if config.algorithm.router_replay:
        from trainer.model.replay import routing_nbytes

        width = routing_nbytes(config)
        return f"{config.algorithm.name}, each token with {width:,} bytes that say its experts"
    return config.algorithm.name


def _ranks(config: RunConfig, seen: _Seen, gpus: RequestedGpus) -> str:
    division = Division(gpus.ranks)
    if gpus.ranks_told:
        division = divide(gpus.ranks, config.trainer)
        check_nodes(gpus.per_node or gpus.ranks, config.trainer.tensor_parallel)
    trainer = config.trainer
    if max(trainer.context_parallel, trainer.tensor_parallel) > 1 or trainer.share_prefixes:
        from trainer.prepare import ranks  # seconds of imports: only where it depends on the model

        ranks.check_model(config)
    seen.division = division
    return str(division) if gpus.ranks_told else "train.sbatch does not say how many: not looked at"


def _engine(config: RunConfig) -> str:
    text = (config.model.path / "config.json").read_text()
    from trainer.prepare import engines

    if config.engine.name == "vllm":
        refuse_missing_engine(config)
        _divides(config)
        engines.check_vllm_model(text)
        engines.check_vllm_options(config.engine.vllm)
        if found := engine_options.fault(config.engine.vllm, harvested=config.run.harvest):
            return f"vllm; the daemon refuses this unless its admin allows it: {'; '.join(found)}"
        return "vllm"
    engines.check_reference(text)
    return (
        "reference: small models and tests; vllm is many times as fast"
        if importlib.util.find_spec("vllm")
        else "reference"
    )


def _divides(config: RunConfig) -> None:
    """Raises `ConfigError` where vLLM could not cut the model's attention over an engine's GPUs."""
    heads = int(models.read_json(config.model.path / "config.json", "").get("num_attention_heads") or 0)
    stages = config.engine.vllm.get("pipeline_parallel_size", 1)
    nodes = config.run.nodes_per_engine
    if nodes > 1 and heads % (ranks := config.run.engine_gpus // (stages if isinstance(stages, int) else 1)):
        raise ConfigError(
            f"run.nodes_per_engine = {nodes} of {config.run.gpus_per_engine} GPUs: the model has {heads} attention heads, which vLLM "
            f"cannot cut into {ranks} equal parts",
            f"set engine.vllm.pipeline_parallel_size = {nodes}: each node then has whole layers",
        )
    for key, gpus in (("run", config.run.gpus_per_engine), ("reserved", config.reserved.gpus_per_engine)):
        if heads % gpus:
            fine = [count for count in (1, 2, 4, 8) if heads % count == 0]
            raise ConfigError(
                f"{key}.gpus_per_engine = {gpus}: the model has {heads} attention heads, which vLLM cannot cut into {gpus} equal parts",
                f"set {key}.gpus_per_engine to one of {', '.join(map(str, fine))}",
            )


def _reserved(config: RunConfig, gpus: RequestedGpus) -> str:
    reserved.refuse_none(config)
    count, each = config.reserved.workers, config.reserved.gpus_per_engine
    if gpus.per_node and each > gpus.per_node:
        raise ConfigError(
            f"reserved.gpus_per_engine = {each}, and train.sbatch asks for {gpus.per_node} GPUs a node",
            "ask for more with --gpus-per-node, or lower it: an engine lies on one node",
        )
    places = gpus.per_node // each * gpus.nodes
    if gpus.per_node and count > places and config.engine.name == "vllm":
        raise ConfigError(
            f"reserved.workers = {count} of {each} GPU{'s' * (each > 1)} each, and train.sbatch's GPUs hold {places}: two vLLM engines "
            "do not fit on one GPU",
            f"set reserved.workers = {places}",
        )
    return f"{count} of {each} GPU{'s' if each > 1 else ''} each: the run goes on without a harvested engine"


def _memory(config: RunConfig, seen: _Seen, gpus: RequestedGpus) -> str:
    assert seen.model is not None
    if not gpus.per_node:
        return "train.sbatch asks for no GPU: not looked at"
    if not gpus.gb:
        return "not looked at: say --gpu-memory-gb"
    shape = shape_of(seen.model)
    longest = _longest(config, seen)
    job = job_of(config, shape, gpus, longest)
    vllm = config.engine.name == "vllm"
    cause, remedy = fit.problem(shape, job)
    if not cause and vllm:
        cause, remedy = fit.cache_problem(shape, job, config.model.context_length)
    if not cause:
        cause, remedy = fit.host_problem(shape, job, gpus.node_gb, gpus.node_has_gb)
    if cause:
        raise ConfigError(cause, remedy)
    held = f"; {_held(config, shape, job, longest)}" if vllm and shape.kv_heads else ""
    look = (
        ""
        if gpus.node_gb
        else f"; LOOK, train.sbatch has no --mem: --mem={fit.asked_gib(shape, job)}G, or Slurm's default counts"
    )
    return f"{_told(shape, job, gpus)}{held}{look}"


def asked_gib(config: RunConfig, facts: ModelFacts, script: str) -> int:
    """GiB of host memory that each node of a train.sbatch (its text) is to ask for, with samples as long as the context."""
    shape = shape_of(facts)
    return fit.asked_gib(shape, job_of(config, shape, gpus_of(script), config.model.context_length))


def memory_fault(config: RunConfig, facts: ModelFacts, script: str) -> tuple[str, str]:
    """Cause and remedy where the GPUs or hosts of a train.sbatch (its text) hold too little for samples as long as the context."""
    shape, gpus = shape_of(facts), gpus_of(script)
    job = job_of(config, shape, gpus, config.model.context_length)
    found = fit.problem(shape, job)
    return found if found[0] else fit.host_problem(shape, job, gpus.node_gb, gpus.node_has_gb)


def job_of(config: RunConfig, shape: ModelShape, gpus: RequestedGpus, longest: int) -> TrainJob:
    """The training job in the words of the model of memory. `longest`: tokens of the longest sample that can come."""
    from trainer.algorithms.rows import resolve

    trainer, lora, exact = config.trainer, config.lora, config.run.deterministic
    reference = resolve(config.algorithm, config.sampling.max_tokens).needs_reference
    return TrainJob(
        gpus.ranks,
        gpus.gb,
        trainer.micro_batch_tokens,
        trainer.activation_checkpointing,
        shape.adapters(lora.rank, lora.targets) if lora.rank else shape.parameters,
        reference and not lora.rank,
        bool(config.reserved.workers),
        _engine_share(config, shape, gpus.gb),
        config.run.engine_gpus,
        config.reserved.gpus_per_engine,
        longest * (config.data.samples_per_prompt if exact else 1),
        0 if exact else trainer.head_chunk_tokens,
        trainer.offload,
        lora_rank=lora.rank,
        targets=lora.targets if lora.rank else (),
        compute=8 if exact else 4 if trainer.compute_dtype == "float32" else 2,
        master=8 if exact else 4,
        per_node=gpus.per_node,
        reserved_workers=config.reserved.workers,
        replicas=trainer.replicas,
        context=trainer.context_parallel,
        tensor=trainer.tensor_parallel,
        sample_tokens=config.model.context_length,
        published=manifest.ITEMSIZE[config.weights.dtype],
        engine=config.engine.name,
    )


def _engine_share(config: RunConfig, shape: ModelShape, gpu_gb: float) -> float:
    """Of a GPU: what vLLM is given, or what a reference engine will take."""
    if config.engine.name == "vllm":
        return config.engine.gpu_memory_share
    value_nbytes = 8 if config.run.deterministic else 2  # bfloat16 on a GPU
    wanted = engine_sizes.reference_nbytes(
        shape, config.engine.max_batch, config.model.context_length, value_nbytes
    )
    return wanted / (gpu_gb * GB) if gpu_gb else 0.0


def _told(shape: ModelShape, job: TrainJob, gpus: RequestedGpus) -> str:
    """What fits, in figures: of a GPU the largest phase, and of a node."""
    asks, rows = fit.need(shape, job), phases.table(shape, job)
    most = max(phases.TRAINING, key=lambda phase: phases.device_nbytes(rows, phase))
    parts = ", ".join(
        f"{row.component} {row.device / GB:.1f}"
        for row in rows
        if row.phase == most and row.device >= GB / 20
    )
    each = ", ".join(f"{phase} {phases.device_nbytes(rows, phase) / GB:.1f}" for phase in phases.PHASES)
    larger = fit.largest_micro(shape, job)
    more = f", the largest that fits has {larger:,}" if larger > job.micro_tokens else ""
    away = fit.offloaded_gb(shape, job) * job.node_ranks
    host = (
        f"; while reserved engines generate, {away:.1f} GB of states wait in pinned host memory on each training node"
        if away
        else ""
    )
    return (
        f"{asks.states:.1f} GB of states and about {asks.step:.1f} GB for a micro-batch of {job.computed_tokens:,} tokens{more}, "
        f"of {gpus.gb:g} GB on each of {gpus.ranks} ({each}; {most}: {parts or 'less than 0.05'}){host}"
        f"; {phases.node_nbytes(shape, job) / GB:.0f} GB of host memory on each training node"
    )


def _longest(config: RunConfig, seen: _Seen) -> int:
    """Tokens of the longest sample that can come: the longest prompt, where it is known, and a whole completion."""
    most = config.model.context_length
    return min(most, seen.longest + config.sampling.max_tokens) if seen.longest else most


def _held(config: RunConfig, shape: ModelShape, job: TrainJob, longest: int) -> str:
    """What the smaller of the two kinds of engines holds at once."""
    cache = fit.cache_of(shape, job)
    whole, expected = cache.samples(longest), longest - config.sampling.max_tokens // 2
    room = cache.samples(expected)
    look = (
        f": LOOK, engine.max_batch = {config.engine.max_batch} is more than fits, set {max(1, room)}"
        if room < config.engine.max_batch
        else ""
    )
    return (
        f"an engine's KV cache ({cache.nbytes / GB:.1f} GB) holds {whole} samples of the longest, {longest:,} tokens, "
        f"{room} of {expected:,}{look}"
    )


def _weights(config: RunConfig, seen: _Seen, gpus: RequestedGpus) -> str:
    assert seen.model is not None
    at_hand = os.environ.get("SCAVENGER_CONFIG")
    return weights.check(config, seen.model, gpus.nodes, Path(at_hand) if at_hand else None)


def _out_dir(config: RunConfig, model: ModelFacts | None) -> str:
    """Where checkpoints and figures go: rights, room for the checkpoints that are kept and the one being written, what sinks need."""
    for name, wanted in (
        ("tensorboard", config.monitor.tensorboard),
        ("wandb", config.monitor.wandb != "off"),
        ("mlflow", bool(config.monitor.mlflow)),
    ):
        if wanted and importlib.util.find_spec(name) is None:
            raise ConfigError(f"monitor.{name} needs {name}", f"install it: pip install 'scavenger[{name}]'")
    out_dir = config.run.out_dir
    there = next(folder for folder in (out_dir, *out_dir.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "this user may not write to it" if there.is_dir() else "it is no folder"
        raise ConfigError(
            f"run.out_dir = {out_dir}: {there}: {why}", "name a folder that this user may write to"
        )
    if model is None or config.lora.rank:
        return str(out_dir)
    one, free = CHECKPOINT_NBYTES * model.parameters, shutil.disk_usage(there).free
    from trainer.checkpoint import checkpoint  # seconds of imports

    held = len(checkpoint.found(out_dir))
    more = max(1, config.checkpoint.keep + 1 - held) * one
    if more > free:
        raise ConfigError(
            f"run.out_dir = {out_dir}: a checkpoint has {one / GB:,.1f} GB; checkpoint.keep = {config.checkpoint.keep} of them and "
            f"one being written want {more / GB:,.1f} GB more, {free / GB:,.1f} GB are free",
            "name a file system with more room, or lower checkpoint.keep",
        )
    return f"a checkpoint has {one / GB:,.1f} GB, {free / GB:,.0f} GB are free; a quota is not looked at"


def _daemon(config: RunConfig) -> str:
    run = config.run
    if not run.state_dir.is_dir():
        raise ConfigError(
            f"run.state_dir: there is no folder {run.state_dir}",
            "name the site's public folder, which its admin knows (`scavenger join` tries it, and init writes it from then on); for a "
            "daemon of your own its state directory, which `scavenger init` makes",
        )
    keys.read_keypair(run.key or keys.key_path_for(run.state_dir))
    if config.daemon.embedded:  # no daemon serves before the job
        embedded.check(config)
        embedded.check_address(config)
        return f"the run starts its own, as {config.daemon.config} says"
    there = keys.read_rendezvous(run.state_dir)
    return f"the daemon on {there.host}"


def report(run_toml: Path, findings: list[StartFinding]) -> tuple[list[str], bool]:
    """Lines for a terminal, and whether a job may be submitted."""
    said = [f"{run_toml}:"]
    for finding in findings:
        word = "REFUSED" if finding.problem else "skipped" if finding.skipped else "ok     "
        note, *looks = finding.note.splitlines() or [""]
        said.append(f"  {word}  {finding.what}{f': {note}' if note else ''}")
        said += [f"           {line}" for line in looks]
        said += [f"           {line}" for line in finding.problem.splitlines()]
    refused = [finding.what for finding in findings if finding.problem]
    plays_alone = not any(
        finding.what in (ENVIRONMENT, EPISODES) for finding in findings
    )  # --local refuses those
    if refused == [DAEMON] and plays_alone:
        said.append(f"a try needs neither daemon nor keys: python -m trainer {run_toml} --local")
    return said, not refused


def document(findings: list[StartFinding]) -> str:
    """The same as JSON, for programs."""
    rows: list[dict[str, Any]] = [
        {"what": f.what, "problem": f.problem, "note": f.note, "skipped": f.skipped} for f in findings
    ]
    return json.dumps(rows, indent=1)
