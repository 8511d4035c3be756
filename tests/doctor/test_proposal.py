"""What `scavenger init --site` takes from a recorded Slurm, and what it leaves to the admin."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scavenger.doctor.facts import CommandOutput, Missing, SiteFacts
from scavenger.doctor.proposal import Proposal, propose
from scavenger.errors import ConfigError
from tests.doctor.site import qos_lines, site

DBD = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "associations"}
LOW, NORMAL = "low||cluster|00:00:00||0.000000||||", "normal|low|cluster|00:00:00||1.000000||||"


def sole(
    config: Mapping[str, str | None] | None = None, answers: dict[str, CommandOutput] | None = None
) -> SiteFacts:
    """The recorded site without its second scavenge partition."""
    facts = site(config, answers=answers)
    lines = [line for line in facts.text("partitions").splitlines() if "PartitionName=scavenge0" not in line]
    return site(config, answers={"partitions": CommandOutput("\n".join(lines) + "\n"), **(answers or {})})


def values(proposal: Proposal) -> dict[str, object]:
    return {one.key: one.value for one in proposal.keys}


def test_the_partition_that_all_others_may_preempt_is_taken_with_its_sizes() -> None:
    found = propose(sole(), "scavenger")
    assert values(found) == {
        "harvest.partition": "scavenge",
        "harvest.cpus_per_engine": 8,
        "owners.proof": "munge",
    }
    assert all(one.why for one in found.keys)
    assert "PriorityTier 1, below every other" in found.keys[0].why
    assert "12 GPUs" in found.keys[0].why
    assert [line.partition(":")[0] for line in found.open] == [
        "owners.groups or owners.users",
        "harvest.max_engines",
    ]
    assert propose(sole(), "scavenger", lacks=["torch", "transformers"]).open == (
        "harvest.python: an environment on the compute nodes with [trainer], or harvest.container: this Python has no torch "
        "and no transformers",
        *found.open,
    )


def test_the_qos_that_engines_have_by_default_is_named_so_that_doctor_looks_at_it() -> None:
    """A site that preempts by partition bounds engines by a QOS all the same (docs/admin.md)."""
    answers = qos_lines(LOW, NORMAL) | {"accounts": CommandOutput("scavenger|scavenge\n")}
    assert values(propose(sole(DBD, answers), "scavenger"))["harvest.qos"] == "scavenge"
    answers["accounts"] = CommandOutput("scavenger|\n")
    assert "harvest.qos" not in values(propose(sole(DBD, answers), "scavenger"))


def test_a_partition_whose_jobs_none_preempts_is_not_proposed_beside_one_that_gives_way() -> None:
    facts = sole()
    text = facts.text("partitions")
    reserved = next(line for line in text.splitlines() if line.startswith("PartitionName=reserved "))
    alone = reserved.replace("PreemptMode=OFF", "PreemptMode=REQUEUE").replace("Tier=100", "Tier=1")
    found = propose(site(answers={"partitions": CommandOutput(text.replace(reserved, alone))}), "scavenger")
    assert values(found)["harvest.partition"] == "scavenge"
    assert "reserved" not in found.keys[0].why


def test_where_none_fits_the_remedy_has_the_lines_for_slurm_conf() -> None:
    with pytest.raises(ConfigError, match="scavenge0") as error:
        propose(site(), "scavenger")
    assert "PriorityTier=0 PreemptMode=REQUEUE" in error.value.remedy
    assert "Nodes=node[1-3]" in error.value.remedy
    with pytest.raises(ConfigError) as error:
        propose(sole({"PreemptType": "preempt/none", "PreemptMode": "OFF"}), "scavenger")
    assert "PreemptType=preempt/partition_prio\n    PreemptMode=REQUEUE" in error.value.remedy


def test_a_partition_that_the_admin_named_is_judged_alone() -> None:
    assert values(propose(sole(), "scavenger", "scavenge"))["harvest.partition"] == "scavenge"
    with pytest.raises(ConfigError, match="'normal' is not preemptible") as error:
        propose(sole(), "scavenger", "normal")
    assert "scavenge" not in error.value.cause
    with pytest.raises(ConfigError, match="no such partition"):
        propose(sole(), "scavenger", "idle")


def test_where_slurm_preempts_by_qos_one_that_may_be_preempted_is_taken() -> None:
    by_qos = {**DBD, "PreemptType": "preempt/qos"}
    accounts = {"accounts": CommandOutput("ai\n")}
    found = values(propose(sole(by_qos, qos_lines(NORMAL, LOW) | accounts), "scavenger"))
    assert (found["harvest.qos"], found["harvest.account"]) == ("low", "ai")
    with pytest.raises(ConfigError, match="no QOS may be preempted") as error:
        propose(sole(by_qos, qos_lines(LOW) | accounts), "scavenger")
    assert "sacctmgr add qos" in error.value.remedy


def test_a_user_without_an_account_is_told_how_to_get_one() -> None:
    nobody = qos_lines(LOW, NORMAL) | {"accounts": CommandOutput("")}
    found = propose(sole(DBD, nobody), "scavenger")
    assert "harvest.account" not in values(found)
    assert any(line.startswith("harvest.account: Slurm enforces associations") for line in found.open)
    assert not any(
        "harvest.account" in line
        for line in propose(sole({**DBD, "AccountingStorageEnforce": "none"}, nobody), "u").open
    )
    assert (
        propose(sole(DBD, qos_lines(LOW)), "u").open[1].startswith("harvest.account: slurmdbd was not read")
    )


def test_who_sees_no_other_users_jobs_is_told_so_unless_it_is_an_operator() -> None:
    private = {**DBD, "PrivateData": "jobs"}
    answers = qos_lines(LOW, NORMAL) | {"accounts": CommandOutput("ai\n")}
    found = propose(sole(private, answers), "scavenger")
    assert any(line.startswith("harvest.sees_all_jobs: PrivateData hides") for line in found.open)
    operator = answers | {"admin": CommandOutput("scavenger|Operator\n")}
    found = propose(sole(private, operator), "scavenger")
    assert values(found)["harvest.sees_all_jobs"] is True
    assert not any("sees_all_jobs" in line for line in found.open)


def test_of_several_types_of_gpus_the_most_frequent_is_taken() -> None:
    text = site().text("nodes").replace("Gres=gpu:h100:4", "Gres=gpu:a100:4", 2)
    found = propose(sole(answers={"nodes": CommandOutput(text)}), "scavenger")
    assert values(found)["harvest.gpu_type"] == "h100"
    assert "4 a100 stay unused" in next(one.why for one in found.keys if one.key == "harvest.gpu_type")


def test_a_slurm_that_does_not_answer_proposes_nothing() -> None:
    with pytest.raises(Missing):
        propose(SiteFacts({"config": CommandOutput(error="no controller")}), "scavenger")
