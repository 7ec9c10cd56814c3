"""The examples for cluster launchers: what each process gets, and what happens when one ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import write_config
from processes import start_process

from ftrain.cluster import ClusterSpec, Membership, membership
from ftrain.cluster.process_group import PEER_FAILED
from ftrain.config import load, plan
from ftrain.launching.protocol import USER_ERROR

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
MANIFEST = ROOT / "examples" / "kubernetes" / "job.yaml"
SERVICE, CLAIM, JOB = yaml.safe_load_all(MANIFEST.read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
LIMIT = 120.0  # seconds; a test that needs them has failed

# A stand-in for srun: it starts the tasks of the step on this machine and exits with the highest
# of their codes.
TASKS_HERE = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$task "$@" & echo $! >> tasks
done
worst=0
for task in $(<tasks); do wait $task; code=$?; ((code > worst)) && worst=$code; done
rm tasks; exit $worst
"""
SCANCEL = """#!/bin/bash
[[ "$*" == "--signal=TERM $SLURM_JOB_ID" ]] && kill -TERM $(<tasks)
"""
# A stand-in for ftrain: ready once it can handle a stop, upon which it creates a directory.
SAVES = """#!{python}
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
os.makedirs("{saved}")
"""


def slurm_option(name: str) -> str:
    (found,) = re.findall(rf"^#SBATCH --{name}=(\S+)$", SBATCH.read_text(), flags=re.MULTILINE)
    return found


def slurm_steps(nodes: int, tasks: int) -> list[dict[str, str]]:
    """Return the variables that SLURM sets for each task, given the tasks on each node."""
    layout = f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}"
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": f"{nodes * tasks}",
        "SLURM_STEP_NODELIST": f"gpu[08-{7 + nodes:02}]",
        "SLURM_STEP_TASKS_PER_NODE": layout,
    }
    return [step | {"SLURM_PROCID": f"{number}"} for number in range(nodes * tasks)]


def pod_environment(index: int, namespace: str = "research") -> dict[str, str]:
    """Return the variables of a container, with $(NAME) expanded as Kubernetes does."""
    environ = {"JOB_COMPLETION_INDEX": f"{index}"}
    for variable in CONTAINER["env"]:
        if "valueFrom" in variable:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
            environ[variable["name"]] = namespace
        else:
            environ[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda name: environ[name[1]], variable["value"]
            )
    return environ


def check_group(members: list[Membership | None], coordinator: str) -> None:
    """Assert that each process has its own index, and that all agree on the rest."""
    there = [member for member in members if member is not None]
    assert [member.process_id for member in there] == list(range(len(members)))
    assert {member.process_count for member in there} == {len(members)}
    assert {member.coordinator for member in there} == {coordinator}
    assert [member.is_chief for member in there] == [True, *[False] * (len(members) - 1)]
    assert len({str(member.spec.as_dict()) for member in there}) == 1


def overrides_in(text: str) -> list[str]:
    return re.findall(r"\b(?:cluster|run)\.\w+=[^\s\"]+", text)


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("nodes", "tasks"),
    [(int(slurm_option("nodes")), int(slurm_option("ntasks-per-node"))), (2, 4), (16, 8), (1, 2)],
)
def test_tasks_of_slurm_are_one_group(nodes, tasks):
    check_group(
        [membership(step) for step in slurm_steps(nodes, tasks)], f"gpu08:{61440 + 4711 % 4096}"
    )


def test_the_pods_are_one_group():
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    members = [membership(pod_environment(index)) for index in range(JOB["spec"]["completions"])]
    check_group(members, "digits-0.digits.research.svc.cluster.local:8476")


def test_the_first_pod_has_the_name_that_all_connect_to():
    name = JOB["metadata"]["name"]
    domain = POD["subdomain"]
    assert pod_environment(0)["FTRAIN_CHIEF"].startswith(f"{name}-0.{domain}.")
    assert SERVICE["metadata"]["name"] == domain
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["publishNotReadyAddresses"] is True
    assert (
        SERVICE["spec"]["selector"].items() <= JOB["spec"]["template"]["metadata"]["labels"].items()
    )
    assert POD["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert any(
        pod_environment(0)["RUN"].startswith(f"{mount['mountPath']}/")
        for mount in CONTAINER["volumeMounts"]
    )


def test_the_manifest_sets_only_variables_that_are_read():
    reader = (ROOT / "ftrain" / "cluster" / "environment.py").read_text()
    (program,) = CONTAINER["args"]
    values = " ".join(variable.get("value", "") for variable in CONTAINER["env"])
    for name in pod_environment(0):
        assert f'"{name}"' in reader or f"${name}" in program or f"$({name})" in values
    assert "$(" not in program  # Kubernetes would expand it


def test_the_job_ends_by_mistakes_and_does_not_count_those_who_follow_others():
    policy = JOB["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in policy
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {USER_ERROR: "FailJob", PEER_FAILED: "Ignore"}
    assert POD["restartPolicy"] == "Never"  # the API refuses the policy otherwise
    names = {rule["onExitCodes"]["containerName"] for rule in policy if "onExitCodes" in rule}
    assert names == {CONTAINER["name"]}


@pytest.mark.parametrize(
    "text", [SBATCH.read_text(), CONTAINER["args"][0]], ids=["slurm", "kubernetes"]
)
def test_the_overrides_are_keys_of_the_config(text):
    found = overrides_in(text)
    assert {override.partition("=")[0] for override in found} >= {
        "cluster.connect_timeout",
        "cluster.hang_timeout",
    }
    limits = plan(load(ROOT / "configs" / "digits.toml", found)).calls["cluster"].arguments
    assert limits["connect_timeout"] > 60
    assert limits["hang_timeout"] > 0


def test_pods_train_as_many_steps_as_the_config_says():
    assert (
        int(pod_environment(0)["STEPS"])
        == plan(load(ROOT / "configs" / "digits.toml", [])).top["steps"]
    )


def test_the_cluster_file_names_a_group():
    path = ROOT / "examples" / "cluster.toml"
    spec = ClusterSpec.load(path)
    tasks = [f"worker:{index}" for index in range(spec.num_tasks("worker"))]
    assert all(f"--task {task} " in path.read_text() for task in tasks)
    members = [membership({"FTRAIN_CLUSTER": f"@{path}", "FTRAIN_TASK": task}) for task in tasks]
    check_group(members, spec.task_address("worker", 0))


@pytest.mark.parametrize(
    "path", [SBATCH, MANIFEST, ROOT / "examples" / "cluster.toml"], ids=lambda path: path.name
)
def test_a_launcher_opens_with_its_command_time_and_result(path):
    assert re.search(r"(?s)\A.{,200}# Command: .*\n# Time: .*Result: ", path.read_text()[:800])


class Pod:
    """The container's program, with a stand-in for ftrain, as process 1 of a pod would run it."""

    def __init__(self, home: Path, ftrain: str):
        self.last = home / "run" / "checkpoints" / "2000"
        self.reported = home / "reported"
        script(home / "bin" / "ftrain", f'#!/bin/bash\necho "$@" >> {self.reported}\n{ftrain}\n')
        environ = pod_environment(0) | {
            "RUN": f"{home / 'run'}",
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        }
        self.command = [*CONTAINER["command"], *CONTAINER["args"]]
        self.environ = environ

    def start(self) -> subprocess.Popen[str]:
        return start_process(self.command, env=self.environ, stdout=subprocess.PIPE, text=True)

    def run(self) -> int:
        return subprocess.run(self.command, env=self.environ, check=False, timeout=LIMIT).returncode


@pytest.mark.parametrize("code", [1, USER_ERROR, PEER_FAILED, 76, 137])
def test_a_pod_ends_with_the_code_of_the_training(tmp_path, code):
    assert Pod(tmp_path, f"exit {code}").run() == code


def test_a_pod_succeeds_once_the_last_checkpoint_is_there(tmp_path):
    pod = Pod(tmp_path, 'mkdir -p "$RUN/checkpoints/$STEPS"')
    assert pod.run() == 0
    assert pod.run() == 0  # replaced too late: the others are done
    (reported,) = pod.reported.read_text().splitlines()
    assert reported.split()[:4] == [
        "train",
        "configs/digits.toml",
        f"run.directory={tmp_path}/run",
        "steps=2000",
    ]


def test_a_pod_that_stops_early_is_not_done(tmp_path):
    assert Pod(tmp_path, "exit 0").run() == PEER_FAILED  # another pod was stopped, so all stopped


@pytest.mark.parametrize("saves_last", [False, True])
def test_a_pod_passes_sigterm_on_and_waits_for_the_save(tmp_path, saves_last):
    pod = Pod(tmp_path, "")
    saved = pod.last if saves_last else pod.last.with_name("700")
    script(tmp_path / "bin" / "ftrain", SAVES.format(python=sys.executable, saved=saved))
    with pod.start() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == (0 if saves_last else PEER_FAILED)
    assert saved.exists()


def test_a_pod_does_not_take_its_own_signal_for_the_code_of_the_training(tmp_path):
    """The shell may receive the signal at the same moment as the training ends."""
    ends_at_once = SAVES.partition("os.makedirs")[0] + "os._exit(0)\n"
    for number in range(20):
        pod = Pod(tmp_path / f"{number}", "")
        script(
            tmp_path / f"{number}" / "bin" / "ftrain",
            ends_at_once.format(python=f"{sys.executable} -SE"),
        )
        with pod.start() as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == PEER_FAILED


class Slurm:
    """The batch script in a directory of its own, with stand-ins for SLURM's commands."""

    def __init__(self, home: Path, srun: str):
        self.home = home
        self.requeued = home / "requeued"
        commands = home / ".venv" / "bin"
        script(commands / "srun", srun)
        script(commands / "scontrol", f'#!/bin/bash\necho "$@" >> {self.requeued}\n')
        script(
            commands / "scancel",
            '#!/bin/bash\n[[ "$*" == "--signal=TERM $SLURM_JOB_ID" ]] && kill -TERM $(<tasks)\n',
        )
        script(commands / "ftrain", f'#!/bin/bash\nexec {sys.executable} -m ftrain "$@"\n')
        self.environ = os.environ | {
            "SLURM_SUBMIT_DIR": f"{home}",
            "SLURM_JOB_ID": f"{os.getpid()}",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_NTASKS": "2",
            "SLURM_NODELIST": "localhost",
            "SLURM_TASKS_PER_NODE": "2",
            "PYTHONPATH": f"{TESTS}",
            "XLA_FLAGS": "",
        }

    def start(self, **variables: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return start_process(["bash", SBATCH], cwd=self.home, env=self.environ | variables, **pipes)

    def run(self, **variables: str) -> int:
        process = self.start(**variables)
        process.communicate(timeout=LIMIT)
        return process.returncode

    def run_until_time_is_over(self, started: str) -> str:
        """Return the output if the time limit ends after the processes have started."""
        with self.start() as process:
            assert process.stdout is not None
            printed = ""
            while not re.search(started, printed):
                line = process.stdout.readline()
                assert line, printed
                printed += line
            process.send_signal(signal.SIGUSR1)
            printed += process.communicate(timeout=LIMIT)[0]
        assert process.returncode == 0, printed
        return printed


def test_the_batch_script_is_one_that_bash_understands():
    subprocess.run(["bash", "-n", SBATCH], check=True)


@pytest.mark.parametrize(
    ("code", "restarts", "goes_on"),
    [
        (0, 0, False),
        (USER_ERROR, 0, False),
        (1, 0, True),
        (PEER_FAILED, 9, True),
        (137, 0, True),
        (137, 10, False),
    ],
)
def test_a_failed_job_goes_back_into_the_queue(tmp_path, code, restarts, goes_on):
    slurm = Slurm(tmp_path, f"#!/bin/bash\nexit {code}\n")
    assert slurm.run(SLURM_RESTART_COUNT=f"{restarts}") == code
    assert slurm.requeued.exists() == goes_on
    assert not goes_on or slurm.requeued.read_text() == f"requeue {os.getpid()}\n"


@pytest.mark.campaign
def test_a_job_whose_time_is_over_saves_and_goes_on_from_there(tmp_path):
    (tmp_path / "configs").mkdir()
    write_config(tmp_path / "configs", steps=1_000_000, every=1_000_000).rename(
        tmp_path / "configs" / "digits.toml"
    )
    slurm = Slurm(tmp_path, TASKS_HERE)
    first = slurm.run_until_time_is_over("first step after")
    assert "2 device(s) of 2 processes" in first
    stopped = re.search(r"stopped at step (\d+) of 1000000 .*the same command resumes there", first)
    assert stopped, first
    assert slurm.requeued.read_text() == f"requeue {os.getpid()}\n"
    second = slurm.run_until_time_is_over("resumed at step")
    assert f"resumed at step {stopped[1]}\n" in second
    assert len(slurm.requeued.read_text().splitlines()) == 2
