"""WarmStart: which leaves a new state takes from a checkpoint of any format."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizer_table import TABLE
from references import FOLDER
from safetensors.numpy import save_file

import ftrain
from ftrain import optimizers
from ftrain.checkpoints import (
    CheckpointError,
    CheckpointManager,
    VocabInfo,
    WarmStart,
    checkpoint_exists,
    init_from_checkpoint,
    list_variables,
    warm_start,
)
from ftrain.checkpoints.tf_names import SLOTS, find_count, parse_slot, slot_variables
from ftrain.optimizers import Group, get_slot
from ftrain.packed import unpack
from ftrain.tree import named_leaves

PARAMS = {"dense": {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}, "head": jnp.zeros(3)}
OLD = {
    "dense/kernel": np.float32([[1, 2], [3, 4]]),
    "dense/bias": np.float32([5, 6]),
    "head": np.float32([7, 8, 9]),
}


def state_of(params=PARAMS, optimizer=None, **options) -> ftrain.TrainState:
    return ftrain.TrainState.create(params, optimizer or optax.sgd(0.1), **options)


def values(tree) -> dict:
    leaves = named_leaves(unpack(tree)).items()
    return {name: np.asarray(leaf).tolist() for name, leaf in leaves if name != "rng"}


@pytest.fixture
def archive(tmp_path):
    np.savez(tmp_path / "old.npz", **OLD)
    return tmp_path / "old.npz"


# Names.


@pytest.mark.parametrize("form", ["params/{}", "{}", "dotted"])
@pytest.mark.parametrize("kind", ["npz", "safetensors", "run"])
def test_parameters_and_model_state_are_found_by_their_names(tmp_path, form, kind):
    state = state_of(model_state={"norm": {"mean": jnp.zeros(1)}})
    arrays = {}
    for name, value in {**OLD, "norm/mean": np.float32([0.5])}.items():
        scope = "model_state/{}" if name.startswith("norm") else "params/{}"
        own = name.replace("/", ".") if form == "dotted" else name
        arrays[(scope if form == "params/{}" else "{}").format(own)] = value
    path = tmp_path / f"old.{kind}"
    if kind == "npz":
        np.savez(path, **arrays)
    elif kind == "safetensors":
        save_file(arrays, path)
    else:
        CheckpointManager(path).save(3, arrays)
    found = WarmStart(path)(state)
    assert {f"dense/{name}" for name in found.params["dense"]} | {"head"} == set(OLD)
    for name, value in named_leaves(found.params).items():
        np.testing.assert_array_equal(value, OLD[name])
    assert found.model_state["norm"]["mean"] == 0.5
    assert found.step == 0
    assert values(found.opt_state) == values(state.opt_state)


def test_include_exclude_and_rename_choose(archive):
    state = state_of()
    only = WarmStart(archive, include="params/dense/.*", exclude=["params/dense/bias"])
    plan = only.plan(state)
    assert plan.sources == {"params/dense/kernel": "dense/kernel"}
    assert plan.kept == ["step", "params/dense/bias", "params/head"]
    assert plan.unused == ["dense/bias", "head"]
    assert str(plan) == f"1 leaves from {archive}, 3 kept"
    found = only(state)
    assert found.params["dense"]["kernel"].tolist() == [[1, 2], [3, 4]]
    assert found.params["head"].tolist() == [0, 0, 0]
    other = {"backbone": PARAMS["dense"]}
    renamed = WarmStart(archive, rename={"^dense/": "backbone/"})(state_of(other))
    assert renamed.params["backbone"]["bias"].tolist() == [5, 6]


def test_what_does_not_fit_is_one_error_that_lists_everything(archive):
    params = {
        "dense": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(2, jnp.int32)},
        "head": jnp.zeros(3, jnp.bfloat16),
        "heads": jnp.zeros(3),
    }
    with pytest.raises(CheckpointError) as raised:
        WarmStart(archive).plan(state_of(params))
    message = str(raised.value)
    for phrase in (
        "leaf params/heads is missing, nearest are head",
        "leaf params/dense/kernel (there dense/kernel) is float32[2, 2], expected float32[2, 3]",
        "leaf params/dense/bias (there dense/bias) is float32[2], expected int32[2]",
        "leaf params/head (there head) is float32, expected bfloat16",
        "include and exclude choose leaves of the new state",
    ):
        assert phrase in message
    del params["heads"], params["dense"]
    assert WarmStart(archive, cast=True)(state_of(params)).params["head"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"include": ["dense/.*"]},
            r"include pattern 'dense/\.\*' matches no leaf of the state; th",
        ),
        (
            {"exclude": ["params/tail"]},
            "exclude pattern 'params/tail' matches no leaf of the state",
        ),
        (
            {"rename": {"tail": "x"}},
            r"rename pattern 'tail' matches no leaf of .*old\.npz; there are",
        ),
        ({"rename": {"dense/.*": "x"}}, "dense/bias and dense/kernel would both be x"),
        ({"include": ["("]}, r"'\(' is not a regular expression"),
        ({"include": ["rng"]}, "include pattern 'rng' matches no leaf"),
        ({"include": "params/head", "exclude": "params/h.*"}, "include and exclude leave no leaf"),
        ({"use_averages": True}, "it has no averages; drop use_averages"),
        ({"vocabularies": {"params/table": VocabInfo([], 1, 0, [])}}, "params/table is not a leaf"),
        ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \(0, 1\)"),
        ({"include": "step"}, "leaf step is missing"),
    ],
)
def test_what_cannot_be_meant_is_an_error(archive, asked, message):
    with pytest.raises(CheckpointError, match=message):
        WarmStart(archive, **asked).plan(state_of())


def test_a_damaged_file_is_one_error(tmp_path):
    save_file(OLD, tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match=r"m.safetensors: array 'head' ends at data byte 36"):
        WarmStart(tmp_path / "m.safetensors")(state_of())


# Averages.


def test_averages_start_from_the_new_parameters_or_are_taken(tmp_path):
    state = state_of({"w": jnp.zeros(2)}, averages=True)
    np.savez(tmp_path / "a.npz", **{"w": np.float32([1, 2]), "averages/w": np.float32([3, 4])})
    found = WarmStart(tmp_path / "a.npz")(state)
    assert values(found.averages) == values(found.params) == {"w": [1, 2]}
    both = WarmStart(tmp_path / "a.npz", include=["params/.*", "averages/.*"])(state)
    assert (values(both.params), values(both.averages)) == ({"w": [1, 2]}, {"w": [3, 4]})
    averaged = WarmStart(tmp_path / "a.npz", use_averages=True)(state)
    assert values(averaged.averages) == values(averaged.params) == {"w": [3, 4]}


def test_parameters_may_be_a_single_array(tmp_path):
    state = state_of(jnp.zeros(2), ftrain.optimizers.adam(0.1), averages=True)
    CheckpointManager(tmp_path).save(1, {"params": np.float32([1, 2])})
    found = WarmStart(tmp_path)(state)
    assert found.params.tolist() == found.averages.tolist() == [1, 2]


# TensorFlow 1.


@pytest.mark.reference
def test_the_names_of_slots_are_those_of_tensorflow():
    cases = json.loads((FOLDER / "optimizer_api.json").read_text())["cases"]
    seen = set()
    for case in cases:
        if case["what"] != "names of slots" or "," in case["note"] or "with" in case["note"]:
            continue
        slots = case["value"]["slot_of_a"]
        if not slots or "scope" in case["note"]:
            continue
        for slot, variable in slots.items():
            name = parse_slot(f"opt_state/slots/{slot}/a")
            assert name is not None
            assert variable in slot_variables(name, frozenset(slots))
        seen.add(frozenset(slots))
    assert seen == set(SLOTS) - {frozenset({"rms", "momentum"})}


@pytest.mark.parametrize("name", TABLE)
def test_training_goes_on_from_tensorflow_names_bit_for_bit(tmp_path, name):
    """Of every optimizer: variables, slots and the global step are handed over in one line."""
    optimizer = TABLE[name](0.1)
    params = {"dense": {"w": jnp.float32([[1, -2], [3, 4]])}, "b": jnp.float32([0.5])}

    def steps(state, count):
        for _ in range(count):
            gradients = jax.tree.map(lambda leaf: leaf * 0.5 + 0.1, state.params)
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = ftrain.apply_updates(state.params, updates)
            state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return state

    first = steps(state_of(params, optimizer), 3)
    arrays = {"global_step": np.int64(3)}
    own = frozenset(first.opt_state.slots)
    for leaf, value in named_leaves(first.params).items():
        arrays[leaf] = np.asarray(value)
        for slot in own:
            parts = parse_slot(f"opt_state/slots/{slot}/{leaf}")
            assert parts is not None
            arrays[slot_variables(parts, own)[-1]] = np.asarray(
                get_slot(first.opt_state, leaf, slot)
            )
    np.savez(tmp_path / "tf.npz", **arrays)
    fresh = state_of(jax.tree.map(jnp.zeros_like, params), optimizer)
    taken = WarmStart(tmp_path / "tf.npz", include=".*")(fresh)
    assert values(steps(taken, 2)) == values(steps(first, 2))


def test_slots_are_found_in_parameter_groups_too(tmp_path):
    groups = [Group("frozen", freeze=True), Group("own", optimizer=optimizers.adagrad(0.1))]
    groups += [Group("fast", learning_rate_scale=10.0)]
    params = {"frozen": jnp.zeros(1), "own": jnp.zeros(1), "fast": jnp.zeros(1), "w": jnp.zeros(1)}
    state = state_of(params, optimizers.groups(optimizers.momentum(0.1, 0.9), groups))
    arrays = {name: np.float32([1]) for name in params} | {"global_step": np.int64(3)}
    arrays |= {"own/Adagrad": np.float32([2]), "fast/Momentum": np.float32([3])}
    np.savez(tmp_path / "a.npz", **arrays, **{"w/Momentum": np.float32([4])})
    found = WarmStart(tmp_path / "a.npz", include=".*")(state)
    assert values(found.params) == {name: [1] for name in params}
    assert get_slot(found.opt_state, "own", "accumulator") == 2
    assert get_slot(found.opt_state, "fast", "momentum") == 3
    assert get_slot(found.opt_state, "w", "momentum") == 4


@pytest.mark.reference
def test_a_run_of_tensorflow_with_adam_is_taken_in_three_lines():
    prefix = FOLDER / "tf_checkpoint" / "training" / "model.ckpt-6"
    cases = json.loads((FOLDER / "tf_checkpoint" / "variables.json").read_text())["cases"]
    case = next(each for each in cases if each["prefix"] == "model.ckpt-6")
    stored = {each["name"]: np.array(each["value"]) for each in case["tensors"]}
    params: dict = {}
    for name in stored:
        if f"{name}/Adam" in stored:
            node = params
            *scopes, own = name.split("/")
            for scope in scopes:
                node = node.setdefault(scope, {})
            node[own] = jnp.zeros(stored[name].shape)
    state = WarmStart(prefix, include=".*")(
        state_of(params, ftrain.optimizers.adam(0.01), averages=True)
    )
    assert int(state.step) == int(stored["global_step"])
    assert int(state.opt_state.count) == int(stored["global_step"])
    for name, value in named_leaves(state.params).items():
        np.testing.assert_array_equal(value, np.float32(stored[name]))
        slot = get_slot(state.opt_state, name, "v")
        np.testing.assert_array_equal(slot, np.float32(stored[f"{name}/Adam_1"]))
    for name, value in named_leaves(state.averages).items():
        expected = stored[f"{name}/ExponentialMovingAverage"]
        np.testing.assert_array_equal(value, np.float32(expected))


ADAM = {"opt_state/": frozenset({"m", "v"})}


@given(
    st.integers(0, 3000),
    st.sampled_from([(0.9, 0.999), (0.5, 0.99), (0.95, 0.9999)]),
    st.sampled_from(["float32", "float64"]),
)
def test_the_count_of_adam_is_derived_from_its_powers(count, betas, dtype):
    stored = {}
    for number, beta in enumerate(betas, start=1):
        power = np.array(beta, dtype)
        for _ in range(count):
            power = power * np.array(beta, dtype)
        stored[f"net/beta{number}_power"] = np.asarray(power)
    names = {name: name for name in stored}
    found = find_count("opt_state/count", ADAM, names, stored.__getitem__, betas)
    assert found is not None
    assert found.value == count


def test_a_count_comes_from_the_step_if_powers_do_not_tell():
    zero = {
        "beta1_power": np.float32(0),
        "beta2_power": np.float32(0),
        "global_step": np.array(9.0),
    }
    stored = {name: np.asarray(value) for name, value in zero.items()}
    names = {name: name for name in stored}
    found = find_count("opt_state/count", ADAM, names, stored.__getitem__, (0.9, 0.999))
    assert found == (9, "global_step")
    stored["global_step"] = np.array(9.5)
    assert find_count("opt_state/count", ADAM, names, stored.__getitem__, (0.9, 0.999)) is None


def test_a_count_in_float_becomes_a_whole_number(tmp_path):
    state = state_of({"w": jnp.zeros(1)}, ftrain.optimizers.adam(0.1))
    arrays = {"w": np.float32([1]), "step": np.float32(7), "opt_state/count": np.float64(6)}
    np.savez(tmp_path / "a.npz", **arrays)
    include = ["params/.*", "step", "opt_state/count"]
    found = WarmStart(tmp_path / "a.npz", include=include)(state)
    assert (int(found.step), int(found.opt_state.count)) == (7, 6)
    assert found.step.dtype == jnp.int32


# Vocabularies.


def test_rows_of_a_table_and_of_its_slots_move_to_a_new_vocabulary(tmp_path):
    state = state_of({"table": jnp.full((3, 2), 9.0)}, ftrain.optimizers.adagrad(0.1))
    table = np.float32([[1, 1], [2, 2], [3, 3]])
    np.savez(tmp_path / "a.npz", table=table, **{"table/Adagrad": table * 10, "global_step": 4})
    (tmp_path / "old.txt").write_text("a\nb\nc\n")
    (tmp_path / "new.txt").write_text("c\nnew\na\n")
    info = VocabInfo(tmp_path / "new.txt", 3, 0, tmp_path / "old.txt")
    found = WarmStart(tmp_path / "a.npz", include=".*", vocabularies={"params/table": info})(state)
    assert found.params["table"].tolist() == [[3, 3], [0, 0], [1, 1]]
    slot = get_slot(found.opt_state, "table", "accumulator")
    np.testing.assert_allclose(slot, [[30, 30], [0.1, 0.1], [10, 10]])


def test_the_functions_of_tensorflow_read_files_too(tmp_path, archive):
    save_file({"dense.bias": np.float32([5, 6])}, tmp_path / "1.safetensors")
    index = {"weight_map": {"dense.bias": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = init_from_checkpoint(PARAMS, tmp_path, {"dense.bias": "dense/bias"})
    assert found["dense"]["bias"].tolist() == [5, 6]
    assert warm_start(PARAMS, archive)["head"].tolist() == [7, 8, 9]
    assert list_variables(archive) == [
        ("dense/bias", (2,)),
        ("dense/kernel", (2, 2)),
        ("head", (3,)),
    ]
    assert checkpoint_exists(archive)
    assert checkpoint_exists(tmp_path)
