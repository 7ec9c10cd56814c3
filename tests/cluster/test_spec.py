"""ClusterSpec beyond the reference: its forms and files, and the checks before a job runs."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.cluster_pb2 import ClusterDef

from ftrain.cluster.spec import ClusterSpec, check_usable, processes

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {1: "c:1"}, "idle": []})
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
indices = st.integers(-(2**31), 2**31 - 1)
jobs = st.dictionaries(
    text, st.one_of(st.lists(text, max_size=4), st.dictionaries(indices, text, max_size=4))
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(text | st.just("job"), inner, max_size=3)
    ),
)


def test_it_is_equal_to_the_same_in_another_order_and_has_no_hash():
    assert ClusterSpec({"ps": {1: "c:1"}, "idle": {}, "worker": {1: "b:1", 0: "a:1"}}) == SPEC
    assert ClusterSpec({"worker": ["a:1"]}) != SPEC
    assert SPEC != None  # noqa: E711 - the operator is tested
    assert SPEC != 5
    with pytest.raises(TypeError, match=r"unhashable"):
        hash(SPEC)


def test_it_is_written_with_its_jobs_in_order():
    assert repr(SPEC) == "ClusterSpec({'idle': {}, 'ps': {1: 'c:1'}, 'worker': ['a:1', 'b:1']})"
    assert repr(ClusterSpec({})) == "ClusterSpec({})"
    assert SPEC.jobs == ["worker", "ps", "idle"]
    assert ClusterSpec(SPEC).jobs == ["idle", "ps", "worker"]  # as in copies of the reference's


def test_what_is_given_out_is_a_copy():
    spec = ClusterSpec({"worker": ["a:1"], "ps": {3: "b:1"}})
    spec.as_dict()["worker"][0] = "changed"
    spec.as_dict()["ps"][3] = "changed"
    spec.as_cluster_def()["job"].clear()
    spec.jobs.clear()
    assert spec.as_dict() == {"worker": ["a:1"], "ps": {3: "b:1"}}


def test_bytes_come_back_as_bytes_and_are_written_as_text():
    spec = ClusterSpec({b"worker": [b"a:1"]})
    assert spec.as_dict() == {b"worker": [b"a:1"]}
    assert spec != ClusterSpec(spec)
    assert (
        ClusterSpec(spec)
        == ClusterSpec({"worker": ["a:1"]})
        == ClusterSpec.from_json(spec.to_json())
    )
    assert processes(spec) == [("worker", 0, "a:1")]
    with pytest.raises(TypeError, match=r"several types; write them all as text"):
        ClusterSpec({"worker": [], b"worker": []})
    for broken in ({"worker": [b"\xff"]}, {"\ud800": []}, {"worker": ["\ud800"]}):
        with pytest.raises(UnicodeError):
            ClusterSpec(broken)


@pytest.mark.parametrize(
    ("index", "error"),
    [("z", ValueError), (None, TypeError), (float("inf"), OverflowError), (2**31, ValueError)],
)
def test_an_index_that_is_none_is_named(index, error):
    with pytest.raises(error, match=r"index .* of .*job 'worker'"):
        ClusterSpec({"worker": {index: "a:1"}})


def test_lists_that_cannot_be():
    with pytest.raises(ValueError, match=r"job 'idle' has no tasks .* check num_tasks"):
        SPEC.job_tasks("idle")
    with pytest.raises(
        IndexError,
        match=r"job 'worker' has the task index -2, before the start of its list of 1",
    ):
        ClusterSpec({"worker": {-2: "a:1", 0: "b:1"}}).job_tasks("worker")
    with pytest.raises(ValueError, match="job 'worker' has a task 2147483647, and a list up to it"):
        ClusterSpec({"worker": {2**31 - 1: "a:1"}}).job_tasks("worker")


def test_a_cluster_def_is_told_from_a_job_of_the_name_job():
    assert SPEC.as_cluster_def() == {
        "job": [
            {"name": "idle", "tasks": {}},
            {"name": "ps", "tasks": {"1": "c:1"}},
            {"name": "worker", "tasks": {"0": "a:1", "1": "b:1"}},
        ]
    }
    for name in ("job", "", "name"):
        spec = ClusterSpec({name: ["a:1"]})
        assert spec.jobs == [name]
        assert ClusterSpec(spec.as_cluster_def()) == spec
    assert ClusterSpec({"job": []}).jobs == ["job"]
    assert ClusterSpec({"job": {0: "a:1"}}).jobs == ["job"]
    assert ClusterSpec({"job": [{"name": "x"}]}) == ClusterSpec({"x": []})
    assert ClusterSpec({"job": [{"tasks": {0: "a:1"}}]}) == ClusterSpec({"": ["a:1"]})
    with pytest.raises(TypeError, match=r"Task address {} must be bytes"):
        ClusterSpec({"job": [{}], "worker": ["a:1"]})


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ([{"name": "x"}, {"name": "x"}], r"job\[1\] .* has the name 'x' of a job before it"),
        ([{"nam": "x"}], r"job\[0\] .* has unknown keys \['nam'\]; expected only name and tasks"),
        ([{"name": 3}], r"job\[0\] .* is {'name': 3}; expected a name"),
        ([{"name": "x", "tasks": ["a:1"]}], r"job\[0\] .* tasks as index: address"),
        ([{"name": "x", "tasks": {"one": "a:1"}}], r"the index 'one' of a task of job 'x'"),
    ],
)
def test_a_cluster_def_with_a_mistake(definition, message):
    with pytest.raises(ValueError, match=message):
        ClusterSpec({"job": definition})


@given(jobs)
def test_a_message_is_read_and_written(jobs):
    spec = ClusterSpec(jobs)
    message = ClusterDef()
    for name in sorted(spec.jobs):
        job = message.job.add(name=name)
        for index in spec.task_indices(name):
            job.tasks[index] = spec.task_address(name, index)
    assert ClusterSpec(message) == spec
    assert spec.as_cluster_def_text() == str(message)


@given(jobs)
def test_every_form_reads_back(jobs):
    spec = ClusterSpec(jobs)
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert ClusterSpec.from_toml(spec.to_toml()) == spec
    assert ClusterSpec(spec.as_cluster_def()) == spec
    assert ClusterSpec.from_json(json.dumps(spec.as_cluster_def())) == spec


def test_the_forms_are_what_one_would_write():
    assert json.loads(SPEC.to_json()) == {"idle": [], "ps": {"1": "c:1"}, "worker": ["a:1", "b:1"]}
    written = 'worker = ["a:1", "b:1"]\nidle = []\n[ps]\n1 = "c:1"\n'
    assert ClusterSpec.from_toml(written) == SPEC
    assert ClusterSpec.from_toml('[[job]]\nname = "x"\ntasks = {0 = "a:1"}') == ClusterSpec(
        {"x": ["a:1"]}
    )


@given(json_values)
def test_any_json_is_a_spec_or_a_value_error(value):
    with contextlib.suppress(ValueError):
        spec = ClusterSpec.from_json(json.dumps(value))
        assert all(
            isinstance(spec.task_address(job, i), str)
            for job in spec.jobs
            for i in spec.task_indices(job)
        )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{", r"not valid JSON"),
        ("[" * 100_000, r"not valid JSON"),
        ('{"a": [], "a": []}', r"not valid JSON: the key 'a' is given twice"),
        ("[]", r"found \[\]; expected addresses"),
        ('{"worker": "a:1"}', r"worker: found 'a:1'; expected addresses"),
        ('{"worker": ["a:1", 7]}', r"worker\.1: found 7; expected an address"),
        ('{"worker": {"01": "a:1"}}', r"worker\.01: the index of a task must be a whole number"),
        ('{"worker": {"99999999999": "a:1"}}', r"worker\.99999999999: the index"),
        ('{"worker": {"3": null}}', r"worker\.3: found None"),
    ],
)
def test_mistakes_in_json_are_named(written, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ClusterSpec.from_json(written)
    path = tmp_path / "nodes.json"
    path.write_text(written)
    with pytest.raises(ValueError, match=rf"nodes\.json: {message}"):
        ClusterSpec.load(path)


def test_files(tmp_path):
    (tmp_path / "a.toml").write_text(SPEC.to_toml())
    (tmp_path / "a.json").write_text(SPEC.to_json())
    assert (
        ClusterSpec.load(tmp_path / "a.toml") == ClusterSpec.load(str(tmp_path / "a.json")) == SPEC
    )
    (tmp_path / "b.toml").write_text("worker = [1]")
    with pytest.raises(ValueError, match=r"b\.toml: worker\.0: found 1"):
        ClusterSpec.load(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"c\.toml: 'utf-8' codec"):
        ClusterSpec.load(tmp_path / "c.toml")
    with pytest.raises(
        ValueError, match=r"a\.yaml: the file of a cluster must end in \.toml or \.json"
    ):
        ClusterSpec.load(tmp_path / "a.yaml")
    with pytest.raises(FileNotFoundError, match=r"nothing\.toml"):
        ClusterSpec.load(tmp_path / "nothing.toml")


def test_processes_come_in_the_order_of_their_ids():
    first = {"zeta": ["z:1"], "worker": {1: "w1:1", 0: "w0:1"}, "evaluator": ["e:1"]}
    spec = ClusterSpec(first | {"ps": ["p:1"], "chief": ["c:1"], "alpha": ["a:1"]})
    assert processes(spec) == [
        ("chief", 0, "c:1"),
        ("worker", 0, "w0:1"),
        ("worker", 1, "w1:1"),
        ("alpha", 0, "a:1"),
        ("zeta", 0, "z:1"),
    ]
    assert processes(ClusterSpec({"worker": ["w:1"], "master": ["m:1"]}))[0] == ("master", 0, "m:1")


@pytest.mark.parametrize("cluster", [{}, {"worker": []}, {"ps": ["a:1"], "evaluator": ["b:1"]}])
def test_a_cluster_in_which_nobody_trains(cluster):
    with pytest.raises(
        ValueError, match=r"none of the jobs .* has a process that trains; add worker"
    ):
        processes(ClusterSpec(cluster))


@pytest.mark.parametrize(
    "address",
    ["a:1", "node-1.some_net.example:65535", "10.0.0.1:80", "[::1]:2222", "[fe80::1%eth0]:1"],
)
def test_addresses_that_can_be_used(address):
    check_usable(ClusterSpec({"worker": [address], "ps": {5: "p:1"}}))


@pytest.mark.parametrize(
    "address",
    [
        *("", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:+1", "a:1:", "::1:80", "[::1]"),
        *("a b:1", "a:1 ", "a:1\n", "http://a:1", "a:\u0663"),
    ],
)
def test_addresses_that_cannot_be_used(address):
    with pytest.raises(ValueError, match=r"task worker:1: "):
        check_usable(ClusterSpec({"worker": ["fine:1", address]}))


def test_an_address_belongs_to_one_task():
    with pytest.raises(
        ValueError,
        match=r"tasks chief:0 and worker:0 both have the address node:1; give each its own",
    ):
        check_usable(ClusterSpec({"worker": ["node:1"], "chief": ["NODE:1"]}))
    check_usable(ClusterSpec({"worker": ["node:1", "node:2"]}))


def test_jobs_that_train_have_no_gaps():
    with pytest.raises(
        ValueError, match=r"job 'worker' has the tasks \[0, 2\], but 2 tasks are numbered from 0"
    ):
        check_usable(ClusterSpec({"worker": {0: "a:1", 2: "b:1"}}))
    with pytest.raises(ValueError, match=r"job 'worker' has the tasks \[-1, 0\]"):
        check_usable(ClusterSpec({"worker": {-1: "a:1", 0: "b:1"}}))
    check_usable(ClusterSpec({"worker": {1: "a:1", 0: "b:1"}, "ps": {4: "c:1"}}))
