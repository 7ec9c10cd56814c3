"""Which process this is, by FTRAIN_CLUSTER, TF_CONFIG, SLURM and Kubernetes.

Values are valid, unusual and hostile.
"""

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftrain.cluster.environment import Membership, expand_nodes, membership
from ftrain.cluster.spec import ClusterSpec

WORKERS = {"worker": ["a:1", "b:1", "c:1"]}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02],big",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "2",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "FTRAIN_PROCESSES": "3",
    "FTRAIN_CHIEF": "digits-0.digits:8476",
}


def described(cluster=WORKERS, job="worker", index=1, **more):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}, **more})


def found_in(environ) -> Membership:
    found = membership(environ)
    assert found is not None
    return found


def test_a_process_on_its_own():
    assert membership({}) is None
    assert (
        membership(
            {"FTRAIN_CLUSTER": " ", "TF_CONFIG": "", "JOB_COMPLETION_INDEX": "3", "PATH": "/bin"}
        )
        is None
    )


def test_the_environment_of_this_process_is_the_default(monkeypatch):
    monkeypatch.setenv("FTRAIN_CLUSTER", described(index=2))
    assert found_in_default().process_id == 2


def found_in_default():
    found = membership()
    assert found is not None
    return found


def test_a_membership_knows_its_place():
    cluster = {"ps": ["p:1"], "worker": ["a:1", "b:1"], "chief": ["c:1"], "evaluator": ["e:1"]}
    worker = found_in({"FTRAIN_CLUSTER": described(cluster)})
    assert worker == Membership(ClusterSpec(cluster), "worker", 1, "FTRAIN_CLUSTER")
    assert (worker.process_id, worker.process_count, worker.is_chief, worker.coordinator) == (
        2,
        3,
        False,
        "c:1",
    )
    chief = found_in({"FTRAIN_CLUSTER": described(cluster, "chief", 0)})
    assert (chief.process_id, chief.process_count, chief.is_chief, chief.coordinator) == (
        0,
        3,
        True,
        "c:1",
    )


def test_ours_from_a_file(tmp_path):
    (tmp_path / "nodes.toml").write_text('worker = ["a:1", "b:1"]')
    environ = {"FTRAIN_CLUSTER": f"@{tmp_path}/nodes.toml", "FTRAIN_TASK": "worker:1"}
    assert found_in(environ) == Membership(
        ClusterSpec({"worker": ["a:1", "b:1"]}), "worker", 1, "FTRAIN_CLUSTER"
    )


def test_ours_with_the_task_beside_it():
    cluster = json.dumps({"cluster": WORKERS})
    assert found_in({"FTRAIN_CLUSTER": cluster, "FTRAIN_TASK": "worker:2"}).index == 2
    assert found_in({"FTRAIN_CLUSTER": described(), "FTRAIN_TASK": "worker:1"}).index == 1
    with pytest.raises(
        ValueError, match=r"FTRAIN_TASK is worker:2, but the task in FTRAIN_CLUSTER is worker:1"
    ):
        membership({"FTRAIN_CLUSTER": described(), "FTRAIN_TASK": "worker:2"})


def test_auto_is_left_to_the_caller_whatever_else_is_there():
    assert (
        membership({"FTRAIN_CLUSTER": "auto", "TF_CONFIG": described(), **SLURM, **KUBERNETES})
        is None
    )


def test_the_first_that_is_there_decides():
    everything = {
        "FTRAIN_CLUSTER": described(index=0),
        "TF_CONFIG": described(),
        **SLURM,
        **KUBERNETES,
    }
    seen = []
    for variable in ("FTRAIN_CLUSTER", "TF_CONFIG", "SLURM_STEP_ID", "FTRAIN_CHIEF"):
        seen.append(found_in(everything).source)
        del everything[variable]
    assert seen == ["FTRAIN_CLUSTER", "TF_CONFIG", "SLURM", "Kubernetes"]
    assert membership({"TF_CONFIG": "{}", **SLURM}) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("on", r"FTRAIN_CLUSTER is 'on'; expected auto, @PATH"),
        ("x" * 10_000, r"FTRAIN_CLUSTER is 'x{77}\.\.\.'; expected"),
        ("{", r"FTRAIN_CLUSTER is not valid JSON"),
        ('{"a":' * 100_000, r"FTRAIN_CLUSTER is not valid JSON"),
        ("{}", r'FTRAIN_CLUSTER has no jobs under "cluster"'),
        (json.dumps({"cluster": WORKERS}), r"FTRAIN_TASK is ''; expected the job and the index"),
        (
            json.dumps({"cluster": {"worker": [1]}}),
            r'FTRAIN_CLUSTER: "cluster": worker\.0: found 1',
        ),
        (json.dumps({"cluster": 5}), r'FTRAIN_CLUSTER: "cluster": found 5'),
        (
            described(index=3),
            r"this process is worker:3, which the cluster does not have; it has worker 0 to 2",
        ),
        (described(job="boss"), r"this process is boss:1, which the cluster does not have"),
        (described(job="ps"), r"this process is ps:1; parameter servers are not needed"),
        (described(index=-1), r"\"index\" of the task is '-1'; expected a whole number"),
        (described(index=True), r"\"index\" of the task is 'True'"),
        (described(index=1.0), r"FTRAIN_CLUSTER has {.*1\.0.*} as \"task\""),
        (described(index=[0]), r"FTRAIN_CLUSTER has .* as \"task\"; expected for example"),
        (described(job=None), r"FTRAIN_CLUSTER has .* as \"task\"; expected for example"),
        (
            described({"worker": ["a:1", "a:1"]}),
            r"FTRAIN_CLUSTER: tasks worker:0 and worker:1 both have the address a:1",
        ),
        (described({"worker": ["a", "b"]}), r"FTRAIN_CLUSTER: task worker:0: "),
        (
            described({"worker": {"1": "a:1", "5": "b:1"}}),
            r"FTRAIN_CLUSTER: job 'worker' has the tasks \[1, 5\]",
        ),
        (described({"worker": ["\ud800:1"]}), r"FTRAIN_CLUSTER: \"cluster\": "),
        ("@", r"FTRAIN_CLUSTER: an empty string is not a path; expected a file or a directory"),
        (
            "@/nowhere/at/all.toml",
            r"FTRAIN_CLUSTER: /nowhere/at/all\.toml: cannot be read: No such file",
        ),
    ],
)
def test_mistakes_in_ours(value, message):
    task = {"FTRAIN_TASK": "worker:1"} if value.startswith("@") else {}
    with pytest.raises(ValueError, match=message):
        membership({"FTRAIN_CLUSTER": value, **task})


@pytest.mark.parametrize(
    "task", ["", "worker", ":1", "worker:", "worker:x", "worker:-1", "worker:\u0663"]
)
def test_mistakes_in_the_task(task):
    with pytest.raises(ValueError, match=r"FTRAIN_TASK"):
        membership({"FTRAIN_CLUSTER": json.dumps({"cluster": WORKERS}), "FTRAIN_TASK": task})


def test_a_file_that_is_none(tmp_path):
    environ = {"FTRAIN_CLUSTER": f"@{tmp_path}", "FTRAIN_TASK": "worker:0"}
    with pytest.raises(ValueError, match=r"FTRAIN_CLUSTER: .* must end in \.toml or \.json"):
        membership(environ)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"FTRAIN_CLUSTER: .*folder\.json: cannot be read"):
        membership(environ | {"FTRAIN_CLUSTER": f"@{tmp_path}/folder.json"})


def test_tf_config():
    cluster = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}
    config = described(cluster, environment="cloud", rpc_layer="grpc")
    assert found_in({"TF_CONFIG": config}) == Membership(
        ClusterSpec(cluster), "worker", 1, "TF_CONFIG"
    )
    # Some launchers write the index as a string.
    assert found_in({"TF_CONFIG": described(cluster, index="1")}).process_id == 2


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"task": {"type": "worker", "index": 0}},
        {"cluster": {}, "task": {"type": "worker", "index": 0}},
        {"cluster": {"worker": ["a:1"]}},
        {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
        {
            "cluster": {"chief": ["a:1"], "ps": ["b:1", "c:1"]},
            "task": {"type": "chief", "index": 0},
        },
    ],
)
def test_tf_config_of_a_process_on_its_own(config):
    assert membership({"TF_CONFIG": json.dumps(config)}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            described({**WORKERS, "ps": ["p:1"]}, "ps", 0),
            r"TF_CONFIG: this process is ps:0; .* the mesh holds",
        ),
        (
            described(job="evaluator", index=0),
            r"TF_CONFIG: this process is evaluator:0; start `ftrain eval RUN --follow`",
        ),
        (json.dumps({"cluster": WORKERS}), r'TF_CONFIG has None as "task"; expected for example'),
        ("[]", r"TF_CONFIG is '\[\]'; expected an object"),
        ("worker", r"TF_CONFIG is not valid JSON"),
    ],
)
def test_mistakes_in_tf_config(config, message):
    with pytest.raises(ValueError, match=message):
        membership({"TF_CONFIG": config})


def test_slurm():
    found = found_in(SLURM)
    addresses = ["node01:61441", "node01:61442", "node02:61441", "node02:61442", "big:61441"]
    assert found == Membership(ClusterSpec({"worker": addresses}), "worker", 2, "SLURM")
    assert (found.process_id, found.process_count, found.coordinator) == (2, 5, "node01:61441")


def test_slurm_ports_stay_in_their_range():
    found = found_in(SLURM | {"SLURM_JOB_ID": "4095"})
    assert found.spec.job_tasks("worker")[:2] == ["node01:65535", "node01:61440"]


def test_slurm_prefers_what_the_step_says():
    allocation = {"SLURM_NTASKS": "9", "SLURM_NODELIST": "x[1-9]", "SLURM_TASKS_PER_NODE": "1(x9)"}
    assert found_in(SLURM | allocation) == found_in(SLURM)
    rest = {
        name: value
        for name, value in SLURM.items()
        if name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
    }
    assert found_in(rest | allocation).process_count == 9


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_ID": "4294967290"},
        {"SLURM_PROCID": ""},
        {"SLURM_JOB_ID": ""},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "1"},
    ],
)
def test_slurm_without_other_tasks(changed):
    assert membership(SLURM | changed) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": ""}, r"SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not set"),
        (
            {"SLURM_STEP_NUM_TASKS": "many"},
            r"SLURM_STEP_NUM_TASKS is 'many'; expected a whole number",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "6"},
            r"SLURM_STEP_TASKS_PER_NODE is '2\(x2\),1', 5 tasks, but the step has 6",
        ),
        (
            {"SLURM_PROCID": "5"},
            r"SLURM: this process is worker:5, which the cluster does not have",
        ),
        ({"SLURM_PROCID": "-1"}, r"SLURM_PROCID is '-1'"),
        ({"SLURM_JOB_ID": "x"}, r"SLURM_JOB_ID is 'x'"),
        ({"SLURM_STEP_NODELIST": ""}, r"SLURM_STEP_NODELIST or SLURM_NODELIST is not set"),
        ({"SLURM_STEP_NODELIST": "node[01-04]"}, r"for 3 nodes, but the node list has 4"),
        ({"SLURM_STEP_NODELIST": "node[01"}, r"SLURM_STEP_NODELIST: 'node\[01' is not a node list"),
        (
            {"SLURM_STEP_NODELIST": "a,b,a"},
            r"SLURM: tasks worker:0 and worker:4 both have the address a:61441",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": ""},
            r"SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is not set",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x2),"},
            r"SLURM_STEP_TASKS_PER_NODE is '2\(x2\),'; expected the tasks",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(3),1"}, r"such as 2\(x3\),1"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "0(x999999999)"},
            r"for 999999999 nodes, but the node list has 3",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "999999999(x999999999)"},
            r"expected the tasks on each node",
        ),
    ],
)
def test_mistakes_of_slurm(changed, message):
    with pytest.raises(ValueError, match=message):
        membership(SLURM | changed)


def test_kubernetes():
    found = found_in(KUBERNETES)
    addresses = ["digits-0.digits:8476", "digits-1.digits:8476", "digits-2.digits:8476"]
    assert found == Membership(ClusterSpec({"worker": addresses}), "worker", 2, "Kubernetes")
    assert found.coordinator == "digits-0.digits:8476"


@pytest.mark.parametrize("chief", ["10.0.0.7:8476", "[fd00::7]:8476", "chief.jobs-0:8476"])
def test_kubernetes_with_a_chief_whose_name_has_no_index(chief):
    found = found_in(KUBERNETES | {"FTRAIN_CHIEF": chief})
    assert found.coordinator == chief
    assert found.spec.job_tasks("worker")[1:] == [
        "process-1.invalid:8476",
        "process-2.invalid:8476",
    ]


def test_kubernetes_with_one_process():
    assert membership(KUBERNETES | {"FTRAIN_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"FTRAIN_PROCESSES": ""}, r"FTRAIN_PROCESSES is not set"),
        ({"FTRAIN_CHIEF": ""}, r"FTRAIN_CHIEF is not set"),
        (
            {"JOB_COMPLETION_INDEX": ""},
            r"JOB_COMPLETION_INDEX is not set, .* completionMode: Indexed",
        ),
        ({"JOB_COMPLETION_INDEX": "3"}, r"JOB_COMPLETION_INDEX is 3, but FTRAIN_PROCESSES is 3"),
        ({"JOB_COMPLETION_INDEX": "x"}, r"JOB_COMPLETION_INDEX is 'x'"),
        ({"FTRAIN_PROCESSES": "0"}, r"FTRAIN_PROCESSES is 0; expected the number of processes"),
        ({"FTRAIN_PROCESSES": "999999999999"}, r"FTRAIN_PROCESSES is 999999999999; expected"),
        ({"FTRAIN_CHIEF": "digits-0.digits"}, r"FTRAIN_CHIEF: .*digits-0\.digits"),
        (
            {"FTRAIN_CHIEF": "digits 0:1"},
            r"Kubernetes: task worker:0: the address 'digits 0:1' has a ' ' in it",
        ),
    ],
)
def test_mistakes_of_kubernetes(changed, message):
    with pytest.raises(ValueError, match=message):
        membership(KUBERNETES | changed)


@pytest.mark.parametrize(
    ("compressed", "nodes"),
    [
        ("node1", ["node1"]),
        ("a,b-c.d_e", ["a", "b-c.d_e"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[3],m[0]", ["n3", "m0"]),
        ("r[1-2]n[01,03]x", ["r1n01x", "r1n03x", "r2n01x", "r2n03x"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_node_lists(compressed, nodes):
    assert expand_nodes(compressed) == nodes


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ",",
            "a,",
            ",a",
            "a,,b",
            "a b",
            "a\n",
            "a[",
            "a]",
            "a[]",
            "a[1",
            "a1]",
            "a[[1]]",
            "a[x]",
        ),
        *("a[1-]", "a[-1]", "a[1,,2]", "a[2-1]", "a[1-2-3]", "a[\u0661]"),
        *(
            "a[0-99999999999]",
            "a[0-999][0-999]",
            "a[0-99999],b",
            "n[" + ",".join(["0-99999"] * 1000) + "]",
        ),
        *("n" + "[0-9]" * 10_000, "a[" + "9" * 5000 + "]", "," * 100_000, "a[1]" * 50 + "("),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_node_lists_that_are_none(text):
    with pytest.raises(ValueError, match=r"node list"):
        expand_nodes(text)


names = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True)
numbers = st.integers(1, 4).flatmap(
    lambda width: st.tuples(st.just(width), st.integers(0, 10**width - 1), st.integers(0, 30))
)


@given(
    st.lists(
        st.tuples(names, st.lists(numbers, max_size=3), st.sampled_from(["", "-ib"])),
        min_size=1,
        max_size=4,
    )
)
def test_node_lists_expand_to_what_was_compressed(groups):
    compressed = []
    nodes = []
    for name, ranges, ending in groups:
        written = [
            f"{low:0{width}d}-{low + more}" if more else f"{low:0{width}d}"
            for width, low, more in ranges
        ]
        compressed.append(f"{name}[{','.join(written)}]{ending}" if ranges else name + ending)
        chosen = [
            f"{n:0{width}d}" for width, low, more in ranges for n in range(low, low + more + 1)
        ]
        nodes += [name + number + ending for number in chosen] if ranges else [name + ending]
    assert expand_nodes(",".join(compressed)) == nodes


@given(st.text(st.sampled_from("ab01,-[].x ()"), max_size=20))
def test_any_text_is_a_node_list_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert all(expand_nodes(text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("a:1"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cluster", "task", "type", "index", "worker", "job", "name"]),
            inner,
            max_size=4,
        )
    ),
)
odd_text = st.one_of(
    st.text(st.characters(exclude_characters="\0"), max_size=10),
    st.integers(-2, 10**20).map(str),
    json_values.map(json.dumps),
    st.text(max_size=8).map("@{}".format),
)


@given(
    st.sampled_from(
        [{"FTRAIN_CLUSTER": described()}, {"TF_CONFIG": described()}, SLURM, KUBERNETES]
    ),
    st.dictionaries(
        st.sampled_from(
            ["FTRAIN_CLUSTER", "FTRAIN_TASK", "TF_CONFIG", "SLURM_NTASKS", *SLURM, *KUBERNETES]
        ),
        odd_text,
    ),
)
@example({"FTRAIN_CLUSTER": "@\ud800.json"}, {"FTRAIN_TASK": "worker:0"})
@example({"FTRAIN_CLUSTER": "@a\0b.json"}, {"FTRAIN_TASK": "worker:0"})
@example({"FTRAIN_CLUSTER": '{"task":' + "[" * 900 + "]" * 900 + "}"}, {})
def test_whatever_stands_there_is_a_membership_or_a_value_error(environ, changed):
    with contextlib.suppress(ValueError):
        found = membership(environ | changed)
        assert found is None or 0 <= found.process_id < found.process_count
