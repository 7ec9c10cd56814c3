"""Cluster specs and placements, compared with the reference's."""

import ast
import json

import pytest
from references import cases

from ftrain.cluster.spec import ClusterSpec
from ftrain.migration.placement import (
    Operation,
    greedy_by_bytes,
    loads_in_bytes,
    replica_device_setter,
)

pytestmark = pytest.mark.reference
SPECS = [case for case in cases("cluster") if case["what"] == "tf.train.ClusterSpec"]
PLACEMENTS = [case for case in cases("cluster") if case["what"] == "tf.train.replica_device_setter"]
GREEDY = [case for case in cases("cluster") if "greedy" in case["what"]]
# How the reference's own messages begin. Others are Python's or protobuf's, and ours say more.
DELIBERATE = (
    "No such job",
    "No task with index",
    "The tasks for job",
    "Task address",
    "Job name",
    "`cluster` must be",
    "ps_strategy must be",
)


def name_of(case):
    return (
        f"{case['note'][:40]}, {case['arguments']}, {case['use_resource']}"
        if "arguments" in case
        else case["note"]
    )


def argument_of(case):
    """Return the argument of the reference; JSON changed tuples to lists, integer keys to text."""
    try:
        return ast.literal_eval(case["argument_repr"])
    except (ValueError, SyntaxError):
        return case["argument"]


def outcome(call, *arguments):
    try:
        return {"value": json.loads(json.dumps(call(*arguments)))}
    except Exception as error:  # noqa: BLE001 - whatever is raised is compared
        return {"error": type(error).__name__, "message": str(error)}


def check(found, expected):
    if "error" not in expected:
        assert found == {"value": expected["value"]}
        return
    assert found.get("error") == expected["error"]
    if expected["message"].startswith(DELIBERATE):
        assert found["message"] == expected["message"]


def test_no_case_is_left_out():
    assert len(SPECS) + len(PLACEMENTS) + len(GREEDY) == len(cases("cluster"))


@pytest.mark.parametrize("case", [case for case in SPECS if "error" in case], ids=name_of)
def test_the_same_arguments_are_refused(case):
    check(outcome(lambda: ClusterSpec(argument_of(case)).as_dict()), case)


@pytest.mark.parametrize("case", [case for case in SPECS if "value" in case], ids=name_of)
def test_a_spec_answers_the_same(case):
    spec = ClusterSpec(argument_of(case))
    expected = case["value"]
    check(outcome(spec.as_dict), expected["as_dict"])
    assert spec.jobs == expected["jobs"]
    assert bool(spec) == expected["bool"]
    assert spec.as_cluster_def_text() == expected["as_cluster_def_text"]
    assert set(spec.jobs) == set(expected["jobs_detail"])
    for job, detail in expected["jobs_detail"].items():
        for method in ("num_tasks", "task_indices", "job_tasks"):
            check(outcome(getattr(spec, method), job), detail[method])
        for index, answer in detail["task_address"].items():
            check(outcome(spec.task_address, job, int(index)), answer)
    for method, answer in expected["unknown_job"].items():
        check(
            outcome(getattr(spec, method), "nobody", *([0] if method == "task_address" else [])),
            answer,
        )


@pytest.mark.parametrize("case", [case for case in SPECS if "value" in case], ids=name_of)
def test_a_spec_is_equal_to_the_same(case):
    argument = argument_of(case)
    spec = ClusterSpec(argument)
    others = {
        "through as_cluster_def": lambda: ClusterSpec(spec.as_cluster_def()),
        "through as_dict": lambda: ClusterSpec(spec.as_dict()),
        "through another ClusterSpec": lambda: ClusterSpec(spec),
        "to its own dict": spec.as_dict,
    }
    assert set(others) == set(case["value"]["equal_after_round_trip"])
    for way, is_equal in case["value"]["equal_after_round_trip"].items():
        assert (spec == others[way]()) is is_equal, way
        assert (spec != others[way]()) is not is_equal, way


def variables_of(case) -> list[Operation]:
    kind = "VarHandleOp" if case["use_resource"] else "VariableV2"
    return [
        Operation(kind, tuple(v["shape"]), v["dtype"], v.get("device", ""))
        for v in case["variables"]
    ]


def placements(case, **more):
    """Return the devices of the variables of a case, in the form of the reference's result."""
    place = replica_device_setter(**case["arguments"], **more)
    if place is None:
        return {"setter": None}
    # The reference creates the initial value of a variable before the variable, and two operations
    # after all variables.
    variables = variables_of(case)
    graph = [
        op
        for variable in variables
        for op in (Operation("Const", device=variable.device), variable)
    ]
    *placed, constant, add = place([*graph, Operation("Const"), Operation("AddV2")])
    named = [
        {"variable": f"v{i}", "device": device, "initializer_device": device}
        for i, device in enumerate(placed[1::2])
    ]
    return {"variables": named, "constant": constant, "add": add}


@pytest.mark.parametrize("case", PLACEMENTS, ids=name_of)
def test_variables_are_placed_the_same(case):
    check(outcome(placements, case), case["result"])


@pytest.mark.parametrize(
    "case", [case for case in PLACEMENTS if "cluster" in case["arguments"]], ids=name_of
)
def test_a_cluster_may_be_a_spec(case):
    given = case["arguments"] | {"cluster": ClusterSpec(case["arguments"]["cluster"])}
    check(outcome(placements, case | {"arguments": given}), case["result"])


@pytest.mark.parametrize("case", GREEDY, ids=name_of)
def test_variables_are_placed_by_size_the_same(case):
    loads = []

    def strategy(operations, tasks):
        chosen = greedy_by_bytes(operations, tasks)
        loads.append(loads_in_bytes(operations, chosen, tasks))
        return chosen

    check(outcome(lambda: placements(case, ps_strategy=strategy)), case["result"])
    assert loads == [case["loads"]]
