"""Placements of operations: precedence, calls of a strategy, and errors."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.cluster.spec import ClusterSpec
from ftrain.migration.placement import (
    STANDARD_PS_OPS,
    Operation,
    greedy_by_bytes,
    loads_in_bytes,
    replica_device_setter,
    round_robin,
)

VARIABLES = [Operation(shape=(size,)) for size in (10, 20, 30, 40, 50)]
operations = st.lists(
    st.builds(
        Operation, shape=st.tuples(st.integers(0, 100)), dtype=st.sampled_from(["int8", "f8"])
    )
)


def devices(graph, **arguments):
    place = replica_device_setter(**arguments)
    assert place is not None
    return place(graph)


def test_every_call_starts_from_the_first_task():
    place = replica_device_setter(ps_tasks=3)
    assert place is not None
    assert place(VARIABLES) == place(VARIABLES) == [f"/job:ps/task:{i % 3}" for i in range(5)]
    assert place([]) == []


@pytest.mark.parametrize("type", STANDARD_PS_OPS)
def test_variables_and_tables_go_to_the_servers(type):
    assert devices([Operation(type), Operation(type)], ps_tasks=2) == [
        "/job:ps/task:0",
        "/job:ps/task:1",
    ]


def test_only_the_given_operations_go_to_the_servers():
    graph = [Operation("Const"), Operation("VarHandleOp"), Operation("Const")]
    assert devices(graph, ps_tasks=2, ps_ops=["Const"]) == [
        "/job:ps/task:0",
        "/job:worker",
        "/job:ps/task:1",
    ]
    assert devices(graph, ps_tasks=2, ps_ops=[]) == ["/job:worker"] * 3


def test_a_sparse_job_of_servers_counts_the_tasks_it_has():
    cluster = ClusterSpec({"ps": {3: "a:1", 7: "b:1"}})
    assert devices(VARIABLES[:3], cluster=cluster) == [
        "/job:ps/task:0",
        "/job:ps/task:1",
        "/job:ps/task:0",
    ]


def test_the_cluster_counts_and_not_ps_tasks():
    assert devices(VARIABLES[:2], cluster={"ps": ["a:1"]}, ps_tasks=5) == ["/job:ps/task:0"] * 2
    named = devices(VARIABLES[:2], cluster={"store": ["a:1", "b:1"]}, ps_device="/job:store")
    assert named == ["/job:store/task:0", "/job:store/task:1"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ps_tasks": 0, "ps_strategy": round_robin},
        {"cluster": {}},
        {"cluster": {"ps": []}},
        {"cluster": {"worker": ["a:1"]}, "ps_tasks": 3},
        {"cluster": {"ps": ["a:1"]}, "ps_device": ""},
        {"cluster": ClusterSpec({b"ps": ["a:1"]})},
    ],
)
def test_nothing_is_placed_without_servers(arguments):
    assert replica_device_setter(**arguments) is None


@pytest.mark.parametrize(
    ("requested", "placed"),
    [
        ("", "/job:ps/task:0/device:CPU:*"),
        ("/task:4", "/job:ps/task:4/device:CPU:*"),
        ("/gpu:1", "/job:ps/task:0/device:GPU:1"),
        ("GPU:*", "/job:ps/task:0/device:GPU:*"),
        ("/device:XPU:3", "/job:ps/task:0/device:XPU:3"),
        ("/job:other", "/job:other/device:CPU:*"),
        ("/job:other/replica:1/task:2", "/job:other/replica:1/task:2/device:CPU:*"),
        ("/job:ps", "/job:ps/task:0/device:CPU:*"),
        ("//job:a/job:ps/", "/job:ps/task:0/device:CPU:*"),
    ],
)
def test_what_an_operation_asks_for_wins_part_by_part(requested, placed):
    assert devices([Operation(device=requested)], ps_tasks=2, ps_device="/job:ps/cpu") == [placed]


def test_what_an_operation_asks_for_wins_as_a_whole_without_merging():
    graph = [
        Operation(device="/gpu:1"),
        Operation(),
        Operation("MatMul", device="/task:3"),
        Operation("MatMul"),
    ]
    placed = devices(graph, ps_tasks=2, merge_devices=False)
    assert placed == ["/device:GPU:1", "/job:ps/task:0", "/task:3", "/job:worker"]


def test_a_server_device_without_a_job_gets_no_task():
    assert devices(VARIABLES[:2], ps_tasks=2, ps_device="/cpu:0") == ["/device:CPU:0"] * 2


def test_a_strategy_is_asked_only_about_what_it_decides():
    graph = [Operation("Const"), VARIABLES[0], Operation(device="/job:worker"), VARIABLES[1]]
    requested = []

    def last(operations, tasks):
        requested.append((operations, tasks))
        return [tasks - 1] * len(operations)

    placed = devices(graph, ps_tasks=4, ps_strategy=last)
    assert placed == ["/job:worker", "/job:ps/task:3", "/job:worker", "/job:ps/task:3"]
    assert requested == [([VARIABLES[0], VARIABLES[1]], 4)]


@pytest.mark.parametrize("chosen", [[0], [0, 1, 0], [0, 2], [-1, 0], [0.5, 0], ["0", "1"]])
def test_a_strategy_that_answers_nonsense_is_refused(chosen):
    with pytest.raises(
        ValueError, match=r"ps_strategy chose .* for 2 operations; expected a task below 2 for each"
    ):
        devices(VARIABLES[:2], ps_tasks=2, ps_strategy=lambda operations, tasks: chosen)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("/job:ps/foo:1", "'foo:1' of the device '/job:ps/foo:1' is not known"),
        ("/job:a:b", "'job:a:b' of the device"),
        ("/task:one", "'one' of the device '/task:one' is not a whole number"),
        ("/cpu:x", "'x' of the device"),
        ("/cpu:0/gpu:0", "two types, CPU and GPU"),
    ],
)
def test_devices_that_are_none(device, message):
    for arguments in ({"ps_device": device}, {"worker_device": device}):
        with pytest.raises(ValueError, match=message):
            replica_device_setter(ps_tasks=1, **arguments)
    with pytest.raises(ValueError, match=message):
        devices([Operation(device=device)], ps_tasks=1)


def test_arguments_that_are_refused():
    with pytest.raises(
        ValueError, match=r"ps_tasks must be the number of parameter servers, or 0 for none, got -1"
    ):
        replica_device_setter(ps_tasks=-1)
    with pytest.raises(TypeError, match=r"ps_strategy must be callable"):
        replica_device_setter(
            ps_tasks=1,
            ps_strategy=0,  # pyright: ignore[reportArgumentType] - the case
        )
    with pytest.raises(TypeError, match=r"`cluster` must be a dictionary"):
        replica_device_setter(cluster=["ps"])


def test_sizes_in_bytes():
    assert Operation(shape=(3, 4), dtype="bfloat16").nbytes == 24
    assert Operation(shape=(3,), dtype=np.complex128).nbytes == 48
    assert Operation(shape=(np.int64(5),), dtype=ml_dtypes.float8_e5m2).nbytes == 5
    assert Operation(dtype="bool").nbytes == 1
    assert Operation(shape=(3,), dtype="string").nbytes == 0
    assert Operation(shape=(0, 10**12)).nbytes == 0
    assert Operation(shape=(10**12,)).nbytes == 4 * 10**12
    for shape in ((None, 3), (-1,), (2.5,)):
        with pytest.raises(ValueError, match=r"the shape .* of a VarHandleOp is not known"):
            _ = Operation(shape=shape).nbytes  # pyright: ignore[reportArgumentType] - the case


@given(operations, st.integers(1, 6))
def test_each_goes_to_the_task_with_the_fewest_bytes(operations, tasks):
    chosen = greedy_by_bytes(operations, tasks)
    for place, task in enumerate(chosen):
        before = loads_in_bytes(operations[:place], chosen[:place], tasks)
        assert before[task] == min(before)
        assert task == before.index(min(before))
    assert sum(loads_in_bytes(operations, chosen, tasks)) == sum(op.nbytes for op in operations)


@given(operations, st.integers(1, 6))
def test_in_turn_no_task_gets_two_more_than_another(operations, tasks):
    chosen = round_robin(operations, tasks)
    counts = [chosen.count(task) for task in range(tasks)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
