"""init_from_checkpoint: an assignment map selects what is read into which leaf."""

import dataclasses
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from memory_checkpoint import Memory, Stored, empty_params, floats, old_checkpoint, values
from references import FOLDER

from ftrain import TrainState, optimizers
from ftrain.checkpoints import CheckpointManager
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.warm_start import init_from_checkpoint, warm_start
from ftrain.cluster import make_mesh
from ftrain.optimizers import adam
from ftrain.packed import is_packed, unpack
from ftrain.tree import named_leaves


class Layer(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    layer: Layer
    activation: object  # a function as a leaf, as equinox has them
    rng: jax.Array


params, checkpoint = (
    pytest.fixture(empty_params, name="params"),
    pytest.fixture(old_checkpoint, name="checkpoint"),
)


# Which leaves are read, and from where.


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ({"old/": "enc/"}, {"enc/w": [1, 2], "enc/b": [3], "head": [0]}),
        ({"/": "/"}, {"enc/w": [4, 5], "enc/b": [6], "head": [7]}),
        ({"old/b": "head"}, {"enc/w": [0, 0], "enc/b": [0], "head": [3]}),
        ({"old/w": "enc/w", "head": "enc/b"}, {"enc/w": [1, 2], "enc/b": [7], "head": [0]}),
        ([("old/b", "enc/b"), ("old/b", "head")], {"enc/w": [0, 0], "enc/b": [3], "head": [3]}),
        ({}, {"enc/w": [0, 0], "enc/b": [0], "head": [0]}),
    ],
)
def test_an_assignment_map_says_which_leaves_are_read(params, checkpoint, assignments, expected):
    assert values(init_from_checkpoint(params, checkpoint, assignments)) == expected
    assert values(params) == {"enc/w": [0, 0], "enc/b": [0], "head": [0]}  # a new tree


def test_the_root_stands_for_no_scope_on_either_side():
    params = {"net": {"w": jnp.zeros(1)}}
    assert values(init_from_checkpoint(params, Memory(w=floats(1)), {"/": "net/"})) == {
        "net/w": [1]
    }
    deep = Memory(a__b__net__w=floats(2))
    assert values(init_from_checkpoint(params, deep, {"a/b/": "/"})) == {"net/w": [2]}


@pytest.mark.parametrize("backwards", [False, True])
def test_the_nearest_entry_counts_in_whatever_order(params, checkpoint, backwards):
    pairs = [("/", "/"), ("old/", "enc/"), ("head", "enc/b")]
    found = init_from_checkpoint(params, checkpoint, pairs[::-1] if backwards else pairs)
    assert values(found) == {"enc/w": [1, 2], "enc/b": [7], "head": [7]}


def test_a_leaf_that_has_its_own_entry_need_not_be_in_the_scope(params):
    checkpoint = Memory(enc__w=floats(4, 5), enc__bias=floats(6), head=floats(7))
    found = init_from_checkpoint(params, checkpoint, {"/": "/", "enc/bias": "enc/b"})
    assert values(found) == {"enc/w": [4, 5], "enc/b": [6], "head": [7]}


def test_a_scope_is_whole_parts_of_names():
    params = {"net": jnp.zeros(1), "net2": {"w": jnp.zeros(1)}, "sub": {"net": {"w": jnp.zeros(1)}}}
    with pytest.raises(CheckpointError, match=r"no leaf to load under net/, nearest are net2/"):
        init_from_checkpoint(params, Memory(w=floats(1)), {"/": "net/"})


def test_a_tree_that_is_one_array_is_read_by_the_name_of_the_scope():
    assert values(init_from_checkpoint(jnp.zeros(2), Memory(a__w=floats(1, 2)), {"a/w/": "/"})) == {
        "": [1, 2]
    }


def test_a_path_is_opened_by_the_reader_of_checkpoints(tmp_path, params):
    CheckpointManager(tmp_path / "checkpoints").save(
        3, {"old": {"b": np.float32([3])}, "head": np.float32([7])}
    )
    assert values(init_from_checkpoint(params, tmp_path, {"old/b": "head"}))["head"] == [3]
    assert values(warm_start(params, str(tmp_path), vars_to_warm_start="head"))["head"] == [7]


# TensorFlow's own files.


@pytest.mark.reference
def test_training_goes_on_from_tensorflow_with_adam_slots_and_moving_averages():
    """Parameters, slots, counts and averages of a run of the reference become an ftrain state."""
    case = next(
        case
        for case in tf_cases()
        if any(each["name"].endswith("/Adam_1") for each in case["tensors"])
    )
    prefix = FOLDER / "tf_checkpoint" / case["directory"] / case["prefix"]
    stored = {each["name"]: np.array(each["value"]) for each in case["tensors"]}
    names = [name.removesuffix("/Adam") for name in stored if name.endswith("/Adam")]
    params = unflatten({name: jnp.zeros(stored[name].shape) for name in names})
    state = TrainState.create(params, optimizers.adam(0.01), averages=True)
    state = warm_start(
        state,
        prefix,
        vars_to_warm_start=["params/", "opt_state/slots/", "opt_state/count", "averages/", "step"],
        var_name_to_prev_var_name={
            "params/(.*)": r"\1",
            "opt_state/slots/m/(.*)": r"\1/Adam",
            "opt_state/slots/v/(.*)": r"\1/Adam_1",
            "averages/(.*)": r"\1/ExponentialMovingAverage",
            "opt_state/count": "global_step",
            "step": "global_step",
        },
    )
    assert int(state.step) == int(state.opt_state.count) == stored["global_step"]
    found = named_leaves(state)
    for name in names:
        for ours, theirs in (("params", ""), ("averages", "/ExponentialMovingAverage")):
            np.testing.assert_array_equal(
                found[f"{ours}/{name}"], np.float32(stored[name + theirs])
            )
        for slot, theirs in (("m", "/Adam"), ("v", "/Adam_1")):
            np.testing.assert_array_equal(
                found[f"opt_state/slots/{slot}/{name}"], np.float32(stored[name + theirs])
            )


@pytest.mark.reference
def test_a_whole_scope_is_taken_from_tensorflow():
    case = next(case for case in tf_cases() if case["directory"] == "training")
    scope = next(each["name"] for each in case["tensors"] if "/" in each["name"]).split("/")[0]
    stored = {
        each["name"]: each["value"]
        for each in case["tensors"]
        if each["name"].startswith(f"{scope}/")
    }
    plain = {name: value for name, value in stored.items() if f"{name}/Adam" in stored}
    tree = {
        "backbone": unflatten(
            {name.removeprefix(f"{scope}/"): jnp.zeros(np.shape(v)) for name, v in plain.items()}
        )
    }
    prefix = FOLDER / "tf_checkpoint" / case["directory"] / case["prefix"]
    found = named_leaves(init_from_checkpoint(tree, prefix, {f"{scope}/": "backbone/"}))
    for name, value in plain.items():
        np.testing.assert_array_equal(
            found[name.replace(f"{scope}/", "backbone/", 1)], np.float32(value)
        )


def tf_cases() -> list[dict]:
    return json.loads((FOLDER / "tf_checkpoint" / "variables.json").read_text())["cases"]


def unflatten(leaves: dict) -> dict:
    tree: dict = {}
    for name, leaf in leaves.items():
        *scopes, own = name.split("/")
        node = tree
        for scope in scopes:
            node = node.setdefault(scope, {})
        node[own] = leaf
    return tree


# Trees of every kind.


def test_keys_and_leaves_that_are_no_numbers_are_in_no_scope():
    module = Module(Layer(jnp.zeros(2), jnp.zeros(1)), jax.nn.relu, jax.random.key(3))
    checkpoint = Memory(
        m__layer__kernel=floats(1, 2), m__layer__bias=floats(3), m__rng=np.zeros(2, np.uint32)
    )
    for found in (
        init_from_checkpoint(module, checkpoint, {"m/": "/"}),
        warm_start(module, checkpoint, var_name_to_prev_var_name={"(.*)": r"m/\1"}),
    ):
        assert isinstance(found, Module)
        assert values(found.layer) == {"kernel": [1, 2], "bias": [3]}
        assert found.activation is jax.nn.relu
        assert found.rng is module.rng


@pytest.mark.parametrize("name", ["rng", "activation"])
def test_keys_and_leaves_that_are_no_numbers_cannot_be_named(name):
    module = Module(Layer(jnp.zeros(2), jnp.zeros(1)), jax.nn.relu, jax.random.key(3))
    checkpoint = Memory(rng=np.zeros(2, np.uint32), activation=floats(0))
    with pytest.raises(
        CheckpointError, match=rf"assignment_map: leaf {name} is .*, expected a dtype of numbers"
    ):
        init_from_checkpoint(module, checkpoint, {name: name})
    with pytest.raises(
        CheckpointError,
        match=rf"vars_to_warm_start: leaf {name} is .*, expected a dtype of numbers",
    ):
        warm_start(module, checkpoint, vars_to_warm_start=[name])


def test_the_slots_of_a_packed_optimizer_state_are_read_by_their_names():
    params = {f"w{n}": jnp.zeros(2) for n in range(10)}
    state = adam(0.1).init(params)
    assert any(map(is_packed, jax.tree.leaves(state, is_leaf=is_packed)))
    slots = {name: value for name, value in values(unpack(state)).items() if name.endswith("m/w3")}
    assert list(slots.values()) == [[0, 0]]
    (name,) = slots
    found = init_from_checkpoint(state, Memory(w3__Adam=floats(5, 6)), {"w3/Adam": name})
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert values(unpack(found)) == {**values(unpack(state)), name: [5, 6]}


def test_a_train_state_is_read_from_a_checkpoint_of_parameters():
    state = TrainState.create({"w": jnp.zeros(2)}, optax.adam(0.1), seed=4)
    found = init_from_checkpoint(
        state, Memory(w=floats(1, 2), global_step=np.int64(9)), {"/": "params/"}
    )
    assert values(found.params) == {"w": [1, 2]}
    assert found.step == 0
    assert (
        init_from_checkpoint(found, Memory(global_step=np.int64(9)), {"global_step": "step"}).step
        == 9
    )


def test_every_leaf_stays_of_its_type():
    tree = {
        "jax": jnp.zeros((), jnp.bfloat16),
        "numpy": np.zeros((), np.float64),
        "scalar": np.float16(0),
        "float": 0.0,
        "int": 0,
        "bool": False,
    }
    checkpoint = Memory(
        jax=np.float32(1.5),
        numpy=np.float32(2.5),
        scalar=np.float32(3.5),
        float=np.array(4.5, "bfloat16"),
        int=np.int32(5),
        bool=np.True_,
    )
    found = init_from_checkpoint(tree, checkpoint, {"/": "/"})
    assert values(found) == {
        "jax": 1.5,
        "numpy": 2.5,
        "scalar": 3.5,
        "float": 4.5,
        "int": 5,
        "bool": True,
    }
    for name, leaf in tree.items():
        assert type(found[name]) is type(leaf)
        assert getattr(found[name], "dtype", None) == getattr(leaf, "dtype", None)


def test_a_value_does_not_share_memory_with_the_checkpoint():
    # On a CPU, jax would use aligned memory without a copy.
    memory = np.zeros(2**16 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 2**16].view(np.float32)
    found = init_from_checkpoint(
        {"a": jnp.ones(2**14), "b": np.ones(2**14, np.float32)},
        Memory(a=array, b=array),
        {"/": "/"},
    )
    array[:] = 5
    assert found["a"].max() == 0
    assert found["b"].max() == 0


def test_leaves_keep_their_sharding_and_what_jax_may_move_stays_so():
    mesh = make_mesh()
    rows = NamedSharding(mesh, PartitionSpec("data"))
    second = jax.devices()[1]
    params = {
        "spread": jax.device_put(jnp.zeros(8), rows),
        "there": jax.device_put(0.0, second),
        "free": jnp.zeros(()),
    }
    checkpoint = Memory(
        spread=np.arange(8, dtype=np.float32), there=np.float32(1), free=np.float32(2)
    )
    found = warm_start(params, checkpoint)
    assert found["spread"].sharding == rows
    assert found["there"].devices() == {second}
    assert not found["free"].committed
    assert values(found) == {"spread": list(range(8)), "there": 1, "free": 2}


def test_shapes_alone_become_arrays_where_they_say():
    rows = NamedSharding(make_mesh(), PartitionSpec("data"))
    params = {
        "spread": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=rows),
        "whole": jax.ShapeDtypeStruct((1,), jnp.int32),
        "left": jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    found = init_from_checkpoint(
        params, Memory(s=floats(1, 2, 3, 4), w=np.array([5])), {"s": "spread", "w": "whole"}
    )
    assert found["spread"].sharding == rows
    assert found["spread"].dtype == jnp.bfloat16
    assert found["left"] is params["left"]
    del found["left"]
    assert values(found) == {"spread": [1, 2, 3, 4], "whole": [5]}


# Mismatches.


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ({"old/": "enc"}, "'old/' for 'enc', but only one is a scope; end both in a slash"),
        ({"old": "enc/"}, "'old' for 'enc/', but only one is a scope"),
        ({"/": "enc"}, "'/' for 'enc', but only one is a scope"),
        ({"old/w": "enc/v"}, "the tree has no leaf enc/v, nearest are enc/w"),
        ({"old/": "end/"}, "no leaf to load under end/, nearest are enc/"),
        ([("old/b", "head"), ("enc/b", "head")], "'old/b' and 'enc/b' for 'head'; keep one"),
        ({"old/w": np.zeros(2)}, r"\('old/w', array.*expected the names of two leaves"),
        ({"old/w": ["enc/w"]}, r"\('old/w', \['enc/w'\]\); expected the names of two leaves"),
        (["old/w"], "'old/w'; expected the names of two leaves"),
    ],
)
def test_an_assignment_map_that_cannot_be_meant_is_an_error(
    params, checkpoint, assignments, message
):
    with pytest.raises(CheckpointError, match=f"assignment_map.*{message}"):
        init_from_checkpoint(params, checkpoint, assignments)


def test_every_leaf_that_is_missing_or_of_another_shape_or_kind_is_listed_and_nothing_is_read():
    params = {
        "a": jnp.zeros(2),
        "b": jnp.zeros(3),
        "c": jnp.zeros((), jnp.int32),
        "d": jnp.zeros(1),
        "e": jnp.zeros(1),
    }
    checkpoint = Memory(s__a=floats(1), s__c=np.float32(0), s__d=floats(1), s__bee=floats(1))
    with pytest.raises(CheckpointError) as raised:
        init_from_checkpoint(params, checkpoint, {"s/": "/"})
    listed, way_out = str(raised.value).split("\n")
    assert listed.startswith(
        "runs/old/7 does not fit: leaf b (there s/b) is missing, nearest are s/bee"
    )
    assert "; leaf e (there s/e) is missing" in listed
    assert "; leaf a (there s/a) is float32[1], expected float32[2]" in listed
    assert "; leaf c (there s/c) is float32[], expected int32[]" in listed
    assert "leaf d" not in listed
    assert "assignment_map" in way_out
    assert checkpoint.reads == []


def test_all_of_many_missing_leaves_are_listed():
    params = {f"leaf{n}": jnp.zeros(1) for n in range(30)}
    with pytest.raises(CheckpointError) as raised:
        warm_start(params, Memory(other=floats(1)))
    assert all(f"leaf {name} is missing" in str(raised.value) for name in params)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (np.int32(1), jnp.float32),
        (np.float32(1), jnp.int32),
        (np.True_, jnp.int32),
        (np.int32(1), jnp.bool_),
        (np.complex64(1), jnp.float32),
        (np.str_("a"), jnp.float32),
    ],
)
def test_a_value_of_another_kind_is_not_cast(stored, wanted):
    with pytest.raises(CheckpointError, match=r"leaf w is .*\[\], expected "):
        init_from_checkpoint({"w": jnp.zeros((), wanted)}, Memory(w=stored), {"w": "w"})


def test_a_dtype_that_numpy_does_not_know_is_of_another_kind(params, monkeypatch):
    checkpoint = Memory(head=floats(1))
    monkeypatch.setattr(Memory, "variables", {"head": Stored((1,), "resource")})
    with pytest.raises(CheckpointError, match=r"leaf head is resource\[1\], expected float32\[1\]"):
        init_from_checkpoint(params, checkpoint, {"head": "head"})


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(np.int64(2**40), jnp.int32), (np.int32(-1), jnp.uint32), (np.float32(1e6), jnp.float16)],
)
def test_a_value_that_is_too_large_for_its_leaf_is_an_error(stored, wanted):
    with pytest.raises(CheckpointError, match=r"leaf w is .* with values too large for"):
        init_from_checkpoint({"w": jnp.zeros((), wanted)}, Memory(w=stored), {"w": "w"})


def test_infinities_and_nans_are_values_like_others():
    found = init_from_checkpoint(
        {"w": jnp.zeros(3, jnp.float16)}, Memory(w=np.array([np.inf, np.nan, 1])), {"w": "w"}
    )
    np.testing.assert_array_equal(found["w"], [np.inf, np.nan, 1])


# Paths that are not checkpoints.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model.safetensors",
            r"model.safetensors: has 1 bytes, expected a header: it is cut off or empty",
        ),
        ("model.npz", r"model.npz is not an .npz file, or damaged: File is not a zip file"),
        ("model.npy", r"is a single numpy array: put it into an .npz file, which names it, not a"),
        (
            "train.tfrecord",
            "train.tfrecord is a .tfrecord file, not a checkpoint; "
            "expected a checkpoint, a directory of",
        ),
        ("LICENSE", "LICENSE is a file, not a checkpoint; expected a checkpoint"),
        (
            "m.ckpt.data-00000-of-00001",
            "is one file of a TensorFlow checkpoint: m.ckpt.index is missing beside it",
        ),
        ("checkpoint", "is TensorFlow's list of checkpoints: use its directory"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_called_what_it_is(params, tmp_path, name, message):
    (tmp_path / name).write_bytes(b"\x00")
    with pytest.raises(CheckpointError, match=message):
        init_from_checkpoint(params, tmp_path / name, {"/": "/"})
    with pytest.raises(CheckpointError, match="nothing does not exist; expected a checkpoint"):
        init_from_checkpoint(params, tmp_path / "nothing", {"/": "/"})


def test_a_file_inside_of_a_checkpoint_leads_to_it(params, tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, params)
    inside = next(path for path in (tmp_path / "5").rglob("*") if path.is_file())
    with pytest.raises(
        CheckpointError, match=rf"is a part of the checkpoint {tmp_path / '5'}: use that path"
    ):
        init_from_checkpoint(params, inside, {"/": "/"})


def test_arrays_in_the_place_of_a_checkpoint_are_refused(params):
    with pytest.raises(
        CheckpointError, match=r"must be a path, or a reader with `variables` and .*, got a dict"
    ):
        init_from_checkpoint(params, params, {"/": "/"})
