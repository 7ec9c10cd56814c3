"""Processes that mpirun, torchrun and others start: they join, or an error says what to set."""

import os
import shutil
import subprocess
import sys

import pytest
from command import environment, run, write_config

from ftrain.cluster import membership

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1752039425",
    "PMIX_RANK": "1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
}
CHIEF = {"FTRAIN_CHIEF": "node1:8476"}


@pytest.mark.parametrize("environ", [OPEN_MPI, TORCHRUN], ids=["open_mpi", "torchrun"])
def test_processes_of_one_host_join_at_a_port_of_their_job(environ):
    rank = next(name for name in environ if name.endswith("RANK"))
    members = [membership(environ | {rank: f"{index}"}) for index in range(2)]
    assert all(member is not None for member in members)
    assert [member.process_id for member in members] == [0, 1]
    assert len({member.coordinator for member in members}) == 1
    assert members[0].coordinator.startswith("127.0.0.1:")
    other = membership(environ | {"PMIX_NAMESPACE": "7", "MASTER_PORT": "29501"})
    assert other.coordinator != members[0].coordinator


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x FTRAIN_CHIEF=HOST:8476"),
        (HYDRA, "mpiexec -genv FTRAIN_CHIEF HOST:8476"),
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"},
            "mpirun -env FTRAIN_CHIEF HOST:8476",
        ),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "flux run --env=FTRAIN_CHIEF=HOST:8476"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "4"}, "jsrun -E FTRAIN_CHIEF=HOST:8476"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "unset WORLD_SIZE if it was left over"),
    ],
)
def test_on_several_hosts_it_must_be_said_where_process_0_is(environ, hint):
    with pytest.raises(
        ValueError, match="but does not give the address of process 0: set FTRAIN_CHIEF"
    ) as caught:
        membership(environ)
    assert hint in str(caught.value)
    assert "FTRAIN_PROCESSES=1 to make each process a run of its own" in str(caught.value)
    found = membership(environ | CHIEF)
    assert found is not None
    assert found.coordinator == "node1:8476"
    assert found.process_count in (2, 4)
    assert membership(environ | {"FTRAIN_PROCESSES": "1"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "8"},
        {"RANK": "3"},
        {"PMIX_RANK": "0"},
        {"PMI_SIZE": "many", "PMI_RANK": "0"},
        # a shell inside an allocation
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NODELIST": "a"},
        SLURM
        | {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "PMIX_RANK": "0",
            "PMI_SIZE": "1",
            "PMI_RANK": "0",
        },
    ],
)
def test_a_single_process_trains_alone(environ):
    assert membership(environ) is None


def test_a_rank_without_a_size_is_refused():
    with pytest.raises(
        ValueError, match="PMIX_RANK is 1, so a launcher has started several processes"
    ):
        membership({"PMIX_RANK": "1"})
    with pytest.raises(
        ValueError,
        match="OMPI_COMM_WORLD_RANK is 2, expected less than OMPI_COMM_WORLD_SIZE, which is 2",
    ):
        membership(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"})
    with pytest.raises(ValueError, match="FTRAIN_CHIEF: an address must be host:port"):
        membership(OPEN_MPI | {"FTRAIN_CHIEF": "node1"})


def test_what_is_said_for_ftrain_comes_first():
    kubernetes = {
        "JOB_COMPLETION_INDEX": "2",
        "FTRAIN_PROCESSES": "3",
        "FTRAIN_CHIEF": "digits-0.digits:8476",
    }
    assert membership(OPEN_MPI | kubernetes).source == "Kubernetes"
    config = (
        '{"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 2}}'
    )
    assert membership(OPEN_MPI | {"TF_CONFIG": config}).process_count == 3


def test_slurm_decides_where_it_says_the_same():
    same = {"PMI_RANK": "1", "PMI_SIZE": "2"}  # as srun --mpi=pmi2 sets them
    assert membership(SLURM | same).source == "SLURM"
    # These are set by mpirun, whose daemons srun has started.
    inside = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
    assert membership(SLURM | inside | CHIEF).process_count == 3
    with pytest.raises(ValueError, match=r"mpirun \(Open MPI\) has started this as process 1 of 3"):
        membership(SLURM | inside)


def test_steps_of_one_slurm_job_have_ports_of_their_own():
    ports = [membership(SLURM | {"SLURM_STEP_ID": f"{step}"}).coordinator for step in range(15)]
    assert len({*ports}) == 15
    others = [
        membership(SLURM | {"SLURM_JOB_ID": f"{4097 + job}"}).coordinator for job in range(1, 200)
    ]
    assert not {*ports} & {*others}
    tasks = [
        membership(SLURM | {"SLURM_STEP_ID": "3", "SLURM_PROCID": f"{task}"}) for task in range(2)
    ]
    assert (
        tasks[0].coordinator == tasks[1].coordinator == f"node01:{61440 + (4097 + 3 * 257) % 4096}"
    )


def test_the_command_refuses_in_one_line(tmp_path):
    config = write_config(tmp_path, steps=5, every=5)
    variables = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    done = run("train", config, f"run.directory={tmp_path / 'run'}", env=environment() | variables)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "ftrain: the cluster cannot be joined: mpirun (Open MPI) has started this as process 1"
    )
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun of Open MPI")
def test_processes_of_a_real_mpirun_train_together(tmp_path):
    config = write_config(tmp_path, steps=10, every=10)
    words = [
        sys.executable,
        "-m",
        "ftrain",
        "train",
        f"{config}",
        f"run.directory={tmp_path / 'run'}",
    ]
    options = [
        "--oversubscribe",
        "--bind-to",
        "none",
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
    ]
    done = subprocess.run(
        ["mpirun", *options, "-n", "2", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 device(s) of 2 processes" in done.stdout
    assert done.stdout.count("done: 10 steps") == 1
