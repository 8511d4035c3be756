"""Which part may import which, held by parsing the source. Nothing is imported, so this runs without torch, MPI or Slurm."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("scavenger", "rollout", "trainer")
TOP_LEVEL = {*PACKAGES, "scripts", "sql", "tests", "docs", "benchmarks", "examples"}
BUILT = {"build", "dist", "demo-out", "__pycache__"}

# What a worker or a trainer may know of the control plane: how to talk to it, and what they agree on.
SHARED = {
    "asyncio_helpers",
    "backoff",
    "client",
    "config",
    "errors",
    "parsing",
    "protocol",
    "resources",
    "sizing",
    "toml",
    "weights",
    "__version__",
}

#: Beyond that: what a try in one process keeps (`--local`), imported there alone; what a Python lacks, asked before torch is imported.
OF_ONE_MODULE = (
    ("trainer/__main__.py", "scavenger.ledger.local_run.LocalLedger"),
    ("trainer/__main__.py", "scavenger.host.packages"),
    ("trainer/episodes/gateway.py", "scavenger.host.packages"),
)

#: Inside `scavenger`, from the bottom up: a part imports from parts before it only, and from itself.
ORDER = (
    "errors",
    "printable",
    "parsing",
    "backoff",
    "sizing",
    "toml",
    "resources",
    "asyncio_helpers",
    "host",
    "protocol",
    "config",
    "weights",
    "client",
    "gateway",
    "cluster",
    "policy",
    "ledger",
    "router.core",
    "router.edge",
    "harvest",
    "observe",
    "guest",
    "doctor",
    "daemon",
    "web",
    "top",
    "demo",
    "simulate",
    "cli",
    "__main__",
)

PURE = (
    "rollout/engines/speculation/*.py",
    "scavenger/backoff.py",
    "scavenger/parsing.py",
    "scavenger/protocol/kv.py",
    "scavenger/protocol/messages/*.py",
    "scavenger/protocol/reserved_memory.py",
    "scavenger/protocol/step_session.py",
    "scavenger/protocol/train_step.py",
    "scavenger/protocol/worker/*.py",
    "scavenger/policy/**/*.py",
    "scavenger/ledger/data_decisions.py",
    "scavenger/ledger/redaction.py",
    "scavenger/ledger/retention.py",
    "scavenger/ledger/records.py",
    "scavenger/router/core/*.py",
    "scavenger/harvest/decide/*.py",
    "scavenger/harvest/track/*.py",
    "scavenger/harvest/pace.py",
    "scavenger/harvest/session.py",
    "scavenger/cluster/model.py",
    "scavenger/cluster/error_kind.py",
    "scavenger/cluster/partition_check.py",
    "scavenger/cluster/reach.py",
    "scavenger/cluster/local/scheduler.py",
    "scavenger/cluster/pyslurm/messages.py",
    "scavenger/cluster/pyslurm/rows.py",
    "scavenger/cluster/slurm/commands.py",
    "scavenger/cluster/slurm/directives.py",
    "scavenger/cluster/slurm/json_output.py",
    "scavenger/cluster/slurm/text.py",
    "scavenger/guest/latencies.py",
    "scavenger/guest/metrics.py",
    "scavenger/gateway/dialects.py",
    "scavenger/gateway/identity.py",
    "scavenger/gateway/series.py",
    "scavenger/doctor/facts.py",
    "scavenger/doctor/findings.py",
    "scavenger/doctor/rules/*.py",
    "scavenger/config/unknown_keys.py",
    "scavenger/daemon/reload.py",
    "scavenger/daemon/takeover.py",
    "scavenger/observe/fleet.py",
    "scavenger/observe/metrics.py",
    "scavenger/observe/tally.py",
    "scavenger/observe/training.py",
    "scavenger/weights/choice.py",
    "scavenger/weights/directory.py",
    "scavenger/weights/manifest.py",
    "scavenger/weights/shards.py",
    "scavenger/weights/transfer.py",
    "scavenger/simulate/**/*.py",
    "scavenger/sizing/*.py",
    "scavenger/top/recorded.py",
    "scavenger/top/text.py",
    "scavenger/top/view.py",
    "trainer/data/curriculum.py",
    "trainer/data/group_filter.py",
    "trainer/data/mixture.py",
    "trainer/data/prefixes.py",
    "trainer/data/replay.py",
)
# A pure module gets time, randomness and the outside world as arguments; so does all that it imports of ours.
IMPURE_MODULES = {
    "alembic",
    "asyncio",
    "concurrent",
    "http",
    "multiprocessing",
    "os",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "sqlalchemy",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
    "zmq",
}
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
SHELLS |= {"asyncio.create_subprocess_shell"}
TORCH_PICKLERS = {"torch.load", "torch.save"}
# torch.distributed's collectives over Python objects.
OBJECT_COLLECTIVES = {"all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list"}
OBJECT_COLLECTIVES |= {"scatter_object_list", "send_object_list"}
IMPORTERS = {"importlib.import_module", "import_module", "__import__"}
IMPORT_NAMES = {"prometheus-client": "prometheus_client", "pyzmq": "zmq"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported dotted name, e.g. `scavenger.protocol.messages.Hello` for `from scavenger.protocol.messages import Hello`."""

    name: str
    where: str

    def is_in(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")


def sources(*patterns: str) -> list[Path]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path for path in found if "__pycache__" not in path.parts)


def product() -> list[Path]:
    scripts = [
        p for p in sources("scripts/*") if p.suffix == ".py" or (p.is_file() and b"python" in first_line(p))
    ]
    return [*sources(*(f"{package}/**/*.py" for package in PACKAGES)), *scripts]


def first_line(path: Path) -> bytes:
    return path.read_bytes().partition(b"\n")[0]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import in the file, wherever it stands; relative ones resolved; `importlib.import_module("x")` included."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree(path)):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, where) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from (Import(f"{prefix}.{alias.name}", where) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func) in IMPORTERS:
            literals = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(name, where) for name in literals if isinstance(name, str))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for the expression `a.b.c`; empty for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node, f"{path.relative_to(ROOT)}:{node.lineno}"


def base_requirements() -> set[str]:
    """Import names of what `pip install scavenger` brings without any extra."""
    return {IMPORT_NAMES.get(name, name) for name in base_distributions()}


def base_distributions() -> set[str]:
    """What `pip install scavenger` asks for without any extra."""
    for node in tree(ROOT / "setup.py").body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "BASE":
            return {re.split(r"[<>=\[]", requirement)[0] for requirement in ast.literal_eval(node.value)}
    raise AssertionError("setup.py has no literal BASE")


def told(offenders: list[str]) -> str:
    return "\n".join(["", *offenders])


def test_the_control_plane_imports_only_itself_and_the_base_install() -> None:
    allowed = base_requirements() | sys.stdlib_module_names | {"scavenger"}
    offenders = [
        f"{found.where} imports {found.name}"
        for path in sources("scavenger/**/*.py")
        for found in imports(path)
        if found.name.split(".")[0] not in allowed
        # Extras, each imported in the one module that adapts it.
        and (path.relative_to(ROOT).as_posix(), found.name.split(".")[0])
        not in (
            ("scavenger/cluster/pyslurm/process.py", "pyslurm"),
            ("scavenger/weights/rdma.py", "nixl"),
            ("scavenger/gateway/app.py", "starlette"),
            ("scavenger/gateway/app.py", "uvicorn"),
            ("scavenger/gateway/prompts.py", "tokenizers"),
            ("scavenger/ledger/read/tokenizer.py", "tokenizers"),
            ("scavenger/weights/delta.py", "zstandard"),
            ("scavenger/observe/otlp.py", "opentelemetry"),
            ("scavenger/guest/proxy.py", "httpx2"),
            ("scavenger/guest/proxy.py", "starlette"),
            ("scavenger/guest/proxy.py", "uvicorn"),
            ("scavenger/web/app.py", "starlette"),
            ("scavenger/web/connections.py", "uvicorn"),
            ("scavenger/top/app.py", "textual"),
        )
    ]
    assert not offenders, told(offenders)


@pytest.mark.parametrize("package", ["rollout", "trainer"])
def test_workers_and_trainers_know_only_the_shared_part_of_the_control_plane(package: str) -> None:
    offenders = [
        f"{found.where} imports {found.name}"
        for path in sources(f"{package}/**/*.py")
        for found in imports(path)
        if found.is_in("scavenger")
        and [*found.name.split("."), ""][1] not in SHARED
        and (path.relative_to(ROOT).as_posix(), found.name) not in OF_ONE_MODULE
    ]
    assert not offenders, told(offenders)


def part_of(name: str) -> str:
    """The part of `scavenger` that a dotted name or a path lies in: its first folder or module, of the router its second too."""
    parts = name.split(".")
    return ".".join(parts[1:3]) if parts[1] == "router" and len(parts) > 2 else parts[1]


def test_every_part_of_the_control_plane_imports_from_below_only() -> None:
    offenders = []
    for path in sources("scavenger/**/*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module.endswith("__init__") and module.count(".") < 2 + (".router." in module):
            continue  # the package's own docstring
        mine = part_of(module)
        assert mine in ORDER or module.startswith("scavenger.router.__init__"), (
            f"{module}: place {mine!r} in ORDER"
        )
        for found in imports(path):
            if not found.is_in("scavenger") or (
                found.name.count(".") == 1 and found.name.split(".")[1] in ("__version__",)
            ):
                continue
            theirs = part_of(found.name)
            if theirs not in ORDER:
                offenders.append(f"{found.where} imports {found.name}, which is in no part")
            elif ORDER.index(theirs) > ORDER.index(mine):
                offenders.append(f"{found.where} ({mine}) imports {found.name}: {theirs} lies above it")
    assert not offenders, told(offenders)


def folders(package: str) -> dict[str, set[str]]:
    """Edges between the folders of a package. A folder's own files count each for itself: they may lie above and below its subfolders."""
    edges: dict[str, set[str]] = {}
    top = ROOT / package

    def unit(path: Path) -> str:
        below = path.relative_to(ROOT)
        has_subfolders = any(one.is_dir() and (one / "__init__.py").exists() for one in path.parent.iterdir())
        return below.as_posix() if has_subfolders else below.parent.as_posix()

    for path in sources(f"{package}/**/*.py"):
        for found in imports(path):
            target = file_of(found) if found.name.split(".")[0] == package else None
            if (
                target is not None
                and target.name != "__init__.py"
                and top in target.parents
                and unit(target) != unit(path)
            ):
                edges.setdefault(unit(path), set()).add(unit(target))
    return edges


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_imports_back(package: str) -> None:
    edges = folders(package)
    for start in sorted(edges):
        seen, todo = set[str](), [(start, start)]
        while todo:
            here, chain = todo.pop()
            for there in sorted(edges.get(here, ())):
                assert there != start, f"{chain} -> {there}"
                if there not in seen:
                    seen.add(there)
                    todo.append((there, f"{chain} -> {there}"))


def test_the_worker_knows_nothing_of_the_trainer() -> None:
    found = [one for path in sources("rollout/**/*.py") for one in imports(path)]
    offenders = [
        f"{one.where} imports {one.name}" for one in found if one.is_in("trainer") or one.is_in("mpi4py")
    ]
    assert not offenders, told(offenders)


# Which part of `rollout` a file of the trainer may know: an engine only in the single-process debug mode; and what
# both sides must compute alike, lest the logits of engine and learner drift apart (torch cannot be shared in `scavenger`). And what is said
# before a run starts is asked of the engines' own code.
SHARED_WITH_ENGINES = {
    "trainer/model/adapters.py": "rollout.engines.lora",
    "trainer/local.py": "rollout.engines",
    "trainer/model/merged.py": "rollout.engines.checksum",
    "trainer/model/learner.py": "rollout.engines.norms",
    "trainer/model/replay.py": "rollout.engines.routing",
    "trainer/prepare/engines.py": "rollout.engines",
    "trainer/loop/publish.py": "rollout.engines.checksum",
    "trainer/loop/ranks.py": "rollout.engines.checksum",
    "trainer/model/memory.py": "rollout.engines.account",
    "trainer/__main__.py": "rollout.engines.account",
}


def test_the_trainer_reaches_an_engine_only_in_its_single_process_debug_mode() -> None:
    offenders = [
        f"{found.where} imports {found.name}"
        for path in sources("trainer/**/*.py")
        for found in imports(path)
        if found.is_in("rollout")
        and not found.is_in(SHARED_WITH_ENGINES.get(path.relative_to(ROOT).as_posix(), "-"))
    ]
    assert not offenders, told(offenders)


@pytest.mark.parametrize(
    "shared", [f"rollout/engines/{name}.py" for name in ("norms", "lora", "checksum", "account", "routing")]
)
def test_what_the_trainer_shares_with_engines_brings_nothing_else_of_ours(shared: str) -> None:
    assert set(reached_from(ROOT / shared)) == {ROOT / shared}


def file_of(found: Import) -> Path | None:
    """The file of ours that an import loads: `a.b.c` is module `a.b.c`, or the name `c` in module `a.b`."""
    return _file_of(found.name)


@functools.cache
def _file_of(name: str) -> Path | None:
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        stem = ROOT.joinpath(*parts[:length])
        for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
            if length and candidate.exists():
                return candidate
    return None


def reached_from(path: Path) -> dict[Path, str]:
    """Every module of ours that importing `path` loads, with the chain of imports that leads there."""
    chains = {path: path.relative_to(ROOT).as_posix()}
    todo = [path]
    while todo:
        here = todo.pop()
        for found in imports(here):
            target = file_of(found) if found.name.split(".")[0] in PACKAGES else None
            if target is not None and target not in chains:
                chains[target] = f"{chains[here]} -> {target.relative_to(ROOT).as_posix()}"
                todo.append(target)
    return chains


def test_a_file_that_one_other_imports_names_the_boundary_that_keeps_it_apart() -> None:
    files = sources(*(f"{package}/**/*.py" for package in PACKAGES))
    importers: dict[Path, set[Path]] = {path: set() for path in files}
    for path in files:
        for found in imports(path):
            target = file_of(found) if found.name.split(".")[0] in PACKAGES else None
            if target is not None and target != path:
                importers[target].add(path)
    unnamed = {
        path.relative_to(ROOT).as_posix()
        for path, users in importers.items()
        if len(users) == 1 and path.name not in ("__init__.py", "__main__.py")
        if "\nBoundary: " not in (ast.get_docstring(tree(path)) or "")
    }
    assert unnamed == set(), "fold it into its importer, or say what keeps it apart: `Boundary: ...`"


def test_pure_modules_reach_no_io_and_hence_no_driver() -> None:
    offenders = {
        f"{chain} imports {found.name}"
        for pure in sources(*PURE)
        for module, chain in reached_from(pure).items()
        for found in imports(module)
        if found.name.split(".")[0] in IMPURE_MODULES
    }
    assert not offenders, told(sorted(offenders))


def test_pure_modules_read_no_clock() -> None:
    clocks = {"datetime.now", "datetime.utcnow", "datetime.datetime.now", "datetime.today", "date.today"}
    offenders = [
        f"{where} calls {name}" for path in sources(*PURE) for name, _, where in calls(path) if name in clocks
    ]
    assert not offenders, told(offenders)


def test_nothing_pickles() -> None:
    offenders = []
    for path in product():
        offenders += [
            f"{one.where} imports {one.name}" for one in imports(path) if one.name.split(".")[0] in PICKLERS
        ]
        offenders += [
            f"{where} calls {name}, which pickles"
            for name, _, where in calls(path)
            if name in TORCH_PICKLERS or name.split(".")[-1] in OBJECT_COLLECTIVES
        ]
    assert not offenders, told(offenders)


def test_no_command_goes_through_a_shell() -> None:
    offenders = []
    for path in [*product(), *sources("tests/**/*.py", "benchmarks/**/*.py", "examples/**/*.py")]:
        for name, call, where in calls(path):
            asks = any(
                keyword.arg == "shell"
                and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                for keyword in call.keywords
            )
            if asks or name in SHELLS:
                offenders.append(f"{where} runs a shell")
    assert not offenders, told(offenders)


def test_there_is_no_top_level_folder_beyond_the_agreed_ones() -> None:
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - BUILT
    extra = {name for name in folders if not name.endswith(".egg-info")} - TOP_LEVEL
    assert not extra, f"{sorted(extra)}: put it into one of {sorted(TOP_LEVEL)}"


def test_every_python_folder_is_a_package_so_that_a_wheel_holds_it() -> None:
    folders = {path.parent for path in sources(*(f"{package}/**/*.py" for package in PACKAGES))}
    lacking = [
        folder.relative_to(ROOT).as_posix()
        for folder in sorted(folders)
        # Alembic reads its revisions by path; setup.py ships them as data.
        if not (folder / "__init__.py").exists() and "migrations" not in folder.parts
    ]
    assert not lacking, f"no __init__.py in {lacking}"


def test_no_two_test_modules_have_one_name_and_none_hides_a_package_of_ours() -> None:
    # pytest imports a test by its path below the first folder without __init__.py.
    names: dict[str, Path] = {}
    for path in sources("tests/**/*.py"):
        parts = [] if path.stem == "__init__" else [path.stem]
        folder = path.parent
        while (folder / "__init__.py").exists():
            parts.insert(0, folder.name)
            folder = folder.parent
        name = ".".join(parts)
        assert parts[0] not in PACKAGES, (
            f"{path.relative_to(ROOT)} hides the package {parts[0]}: remove its __init__.py"
        )
        assert path.stem == "conftest" or name not in names, (
            f"{path} and {names[name]} are both module {name}"
        )
        names[name] = path
