"""How the three packages are installed, and what ships beside them.

The repository keeps SQL and job templates in top-level folders, where an admin looks for them. A wheel has no top level
of its own, so the build copies them to `scavenger/_data/`; `scavenger.resources.path` finds them in either place. `BASE`
is a literal: `tests/test_architecture.py` reads it to hold that the control plane imports nothing else.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

BASE = [
    "alembic>=1.13",
    "blake3>=1.0",
    "jinja2>=3.1",
    "msgspec>=0.19",
    "numpy>=1.26",
    "prometheus-client>=0.19",
    "pydantic>=2.7",
    "pyzmq>=26",
    "rich>=13.7",
    "sqlalchemy>=2.0.30",
    "structlog>=24",
    "typer>=0.12",
    "xxhash>=3.4",
]
# Token ids as text: scavenger/ledger/read/tokenizer.py, scavenger/gateway/prompts.py. It brings a client of a model hub.
TEXT = ["tokenizers>=0.19"]
# What pulls and publishes weights: scavenger/weights/delta.py.
WEIGHTS = ["zstandard>=0.22"]
PARQUET, MATH, LORA = ["pyarrow>=15"], ["math-verify>=0.8"], ["peft>=0.15"]
# scavenger/gateway/app.py and scavenger/web/app.py. vLLM brings both.
GATEWAY = [*TEXT, "starlette>=1.0", "uvicorn>=0.40"]
# scavenger/observe/otlp.py. vLLM brings both.
OTEL = ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"]
# scavenger/top.
TOP = [*TEXT, "textual>=6.0"]
# httpx2 and tenacity are for trainer.judge; transformers brings httpx2 too.
TRAINER = [
    *TEXT,
    *WEIGHTS,
    "torch>=2.6",
    "transformers>=4.51",
    "mpi4py>=4.0",
    "safetensors>=0.4.3",
    "httpx2>=2.0",
    "tenacity>=8.3",
]
EXTRAS = {
    "trainer": TRAINER,
    "text": TEXT,
    "parquet": PARQUET,
    "math": MATH,
    "lora": LORA,
    "gateway": GATEWAY,
    # scavenger/guest/proxy.py. vLLM brings all of it.
    "guest": [*GATEWAY, "httpx2>=2.0"],
    "top": TOP,
    "web": GATEWAY,
    "otel": OTEL,
    "tensorboard": ["tensorboard>=2.14"],
    "wandb": ["wandb>=0.17"],
    # The client alone; the server, `mlflow`, is the site's.
    "mlflow": ["mlflow-skinny>=3"],
    # With a CUDA GPU. Without one: requirements-vllm-cpu.txt.
    "vllm": [*TEXT, *WEIGHTS, "vllm>=0.32", "torch>=2.6", "transformers>=4.51"],
    # Another trainer on the same engines: examples/trl_grpo.py, trl_async_grpo.py. Their tests are skipped without it.
    "trl": [*TRAINER, "trl>=1.16", "datasets>=4.7", "accelerate>=1.10"],
    # For trainer.episodes.worker, in an interpreter of its own (data.environment_python): it needs 100 other packages, and other versions
    # than constraints.txt has; so it is not in dev, and its tests are skipped without it.
    "verifiers": ["verifiers>=0.4,<0.5", *GATEWAY, "httpx2>=2.0"],
    "postgres": ["psycopg[binary]>=3.1"],
    # Only the one of the site's own Slurm X.Y works: scripts/build-pyslurm builds it from pyslurm's tag with the site's headers.
    # Later releases dropped the calls that are read (scavenger/cluster/pyslurm/process.py).
    "pyslurm": ["pyslurm>=22.5,<25"],
    "nixl": ["nixl>=1.0"],
    # A launcher and library for machines without their own MPI; a cluster uses its site's.
    "mpi": ["mpich>=4.2"],
    "dev": [
        *TRAINER,
        *PARQUET,
        *MATH,
        *LORA,
        *GATEWAY,
        *TOP,
        *OTEL,
        "psycopg[binary]>=3.1",  # the ledger's tests run on PostgreSQL too where it is installed
        "hypothesis>=6.100",
        "mypy>=1.11",
        "playwright>=1.50",  # drives Debian's Chromium; axe looks for what keeps somebody from using a page
        "axe-playwright-python>=0.1.5",
        "psutil>=5.9",
        "pytest>=8",
        "pytest-cov>=6",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "pyyaml>=6",
        "ruff>=0.6",
        "scipy>=1.13",
        "setuptools>=77",
        "mkdocs-material>=9.6",  # the documentation's site (mkdocs.yml), and its versions
        "mike>=2.1",
    ],
}

# Patterns below the repository's root; directories are kept.
DATA = ["sql/**/*.sql", "scripts/*.j2", "scripts/*.sbatch", "scripts/*.service", "examples/**/*.toml"]
# Patterns below each package.
PACKAGE_DATA = [
    "py.typed",
    *(f"**/*.{suffix}" for suffix in ("sql", "j2", "html", "css", "js", "svg", "mako", "ini", "toml")),
    # Alembic loads revisions by path, not by import: their folder need not be a package.
    "ledger/migrations/**/*.py",
]


def data_files() -> list[Path]:
    """Files that the wheel carries under `scavenger/_data`, relative to the repository's root."""
    return sorted({p.relative_to(ROOT) for pattern in DATA for p in ROOT.glob(pattern) if p.is_file()})


class BuildWithData(build_py):
    """`build_py` that also copies `DATA`; an editable install reads the clone itself and copies nothing."""

    def _data_targets(self) -> list[tuple[Path, Path]]:
        base = Path(self.build_lib) / "scavenger" / "_data"
        return [(ROOT / relative, base / relative) for relative in data_files()]

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, target in self._data_targets():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        return (
            outputs
            if self.editable_mode
            else [*outputs, *(str(target) for _, target in self._data_targets())]
        )


readme = ROOT / "README.md"

setup(
    name="scavenger",
    version="0.2.0",
    description="Turns the idle GPUs of a Slurm cluster into rollout capacity for reinforcement learning of LLMs",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(
        include=["scavenger", "scavenger.*", "rollout", "rollout.*", "trainer", "trainer.*"]
    ),
    package_data=dict.fromkeys(("scavenger", "rollout", "trainer"), PACKAGE_DATA),
    include_package_data=False,
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["scavenger = scavenger.cli.main:main"]},
    cmdclass={"build_py": BuildWithData},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)
