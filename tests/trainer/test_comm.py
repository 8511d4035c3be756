"""Which of its host's ranks a rank is: the GPU that it takes, and its ports, hang on it."""

from __future__ import annotations

import pytest

from trainer.loop import comm


def test_ranks_of_mpirun_within_a_job_are_not_all_the_batch_script_s_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "0")  # the batch script's, which every rank inherits
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    assert comm.local_rank() == 1
    monkeypatch.delenv("MPI_LOCALRANKID")
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert comm.local_rank() == 3
