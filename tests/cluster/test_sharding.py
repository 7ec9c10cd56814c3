import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import ftrain
from ftrain.cluster.mesh import BATCH_AXES, make_mesh
from ftrain.cluster.sharding import (
    Sharding,
    bytes_per_device,
    leaf_bytes_per_device,
    leaves_with_rule_names,
)
from ftrain.optimizers import adam
from ftrain.packed import Packed
from ftrain.tree import count_bytes

P = PartitionSpec
AXES = {"data": 2, "fsdp": 4, "model": 2}
KERNEL = {"leaf": "dense/kernel", "axes": ["", "model"]}


def shape(*lengths: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(lengths, dtype)


def make_params(width: int = 64, vocabulary: int = 256, layers: int = 2):
    def block(key: jax.Array):
        first, second = jax.random.split(key)
        return {
            "in": {
                "kernel": jax.random.normal(first, (width, 4 * width)) * 0.05,
                "bias": jnp.zeros(4 * width),
            },
            "out": {
                "kernel": jax.random.normal(second, (4 * width, width)) * 0.05,
                "bias": jnp.zeros(width),
            },
        }

    keys = jax.random.split(jax.random.key(0), layers + 1)
    embedding = jax.random.normal(keys[0], (vocabulary, width)) * 0.1
    return {"embedding": embedding, "blocks": [block(key) for key in keys[1:]]}


def loss_fn(params, batch, rng):
    hidden = params["embedding"][batch["x"]]
    for block in params["blocks"]:
        inner = jax.nn.relu(hidden @ block["in"]["kernel"] + block["in"]["bias"])
        hidden += inner @ block["out"]["kernel"] + block["out"]["bias"]
    hidden += 0.01 * jax.random.normal(rng, hidden.shape)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["embedding"].T, batch["y"]
    )
    return losses.mean(), {}


def make_state(optimizer, **sizes) -> ftrain.TrainState:
    return ftrain.TrainState.create(make_params(**sizes), optimizer, averages=True)


def abstract_state(optimizer, **sizes) -> ftrain.TrainState:
    return jax.eval_shape(lambda: make_state(optimizer, **sizes))


def specs_by_name(sharding: Sharding, tree, axes=None) -> dict[str, PartitionSpec]:
    specs = jax.tree.leaves(sharding.specs(tree, axes or AXES))
    return dict(zip((name for name, _ in leaves_with_rule_names(tree)), specs, strict=True))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((256, 64), P("fsdp")),
        ((64, 256), P(None, "fsdp")),
        ((128, 128), P("fsdp")),
        ((3, 1001, 128), P(None, None, "fsdp")),
        ((16_384,), P("fsdp")),
        ((127, 129), P()),
        ((63, 129), P()),
        ((), P()),
    ],
)
def test_large_leaves_are_split_along_their_largest_dimension_that_divides(lengths, expected):
    assert Sharding(min_size=2**14).specs({"x": shape(*lengths)}, AXES) == {"x": expected}


def test_small_leaves_and_meshes_without_the_axis_split_nothing():
    tree = {"small": shape(255, 256), "large": shape(256, 256)}
    assert Sharding().specs(tree, AXES) == {"small": P(), "large": P("fsdp")}
    for axes in (AXES | {"fsdp": 1}, {"data": 8}):
        assert Sharding(min_size=1).specs(tree, axes) == {"small": P(), "large": P()}
        assert Sharding(min_size=1).undivided({"odd": shape(3, 5)}, axes) == []


def test_keys_are_never_split():
    tree = {"keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)), "x": shape(8)}
    rule = {"leaf": ".*", "axes": ["fsdp"]}
    assert (
        Sharding(min_size=1).specs(tree, AXES)
        == Sharding([rule]).specs(tree, AXES)
        == {"keys": P(), "x": P("fsdp")}
    )
    with pytest.raises(ValueError, match="the rule for 'keys' matches no leaf"):
        Sharding([{"leaf": "keys", "axes": ["fsdp"]}]).specs(tree, AXES)


@pytest.mark.parametrize("optimizer", [adam(0.1), adam(0.1, packed=False), optax.adam(0.1)])
def test_a_rule_holds_for_a_parameter_its_slots_and_its_average(optimizer):
    state = abstract_state(optimizer, width=80, layers=8)
    found = specs_by_name(Sharding([{"leaf": "in/kernel", "axes": ["fsdp", "model"]}]), state)
    split = {name for name, spec in found.items() if spec == P("fsdp", "model")}
    assert len(split) == 8 * 4
    assert all(name.endswith("/in/kernel") for name in split)
    for block in range(8):
        assert {f"params/blocks/{block}/in/kernel", f"averages/blocks/{block}/in/kernel"} <= split


def test_packed_slots_are_named_by_what_they_stand_for_and_their_vector_is_a_leaf_like_others():
    state = abstract_state(adam(0.1), width=80, layers=8)
    assert isinstance(state.opt_state.slots["m"], Packed)
    named = dict(leaves_with_rule_names(state))
    assert len(named) == len(jax.tree.leaves(state))
    assert named["opt_state/slots/m/blocks/3/in/kernel"].shape == (80, 320)
    vector = 8 * (80 + 320)
    assert named["opt_state/slots/v/packed/float32"].shape == (vector,)
    found = specs_by_name(Sharding(min_size=vector), state)
    assert found["opt_state/slots/v/packed/float32"] == P("fsdp")
    (reported,) = Sharding(min_size=vector).undivided(
        {"opt_state": state.opt_state.slots["m"]}, AXES | {"fsdp": 7}
    )[-1:]
    assert re.match(
        rf"opt_state/packed/float32 of shape \[{vector}\] is replicated on every device", reported
    )


def test_the_first_rule_that_matches_holds_and_may_say_less_than_all_dimensions():
    tree = {"dense": {"kernel": shape(8, 8, 8)}, "kernel": shape(8, 8)}
    rules = [
        {"leaf": "dense/kernel", "axes": ["model"]},
        {"leaf": "kernel", "axes": [None, "data+fsdp"]},
    ]
    assert Sharding(rules).specs(tree, AXES) == {
        "dense": {"kernel": P("model")},
        "kernel": P(None, ("data", "fsdp")),
    }
    listed = [{"leaf": "kernel", "axes": [["fsdp", "model"], ""]}]
    assert Sharding(listed).specs(tree, AXES)["kernel"] == P(("fsdp", "model"))
    nowhere = [{"leaf": ".*", "axes": []}]
    assert set(specs_by_name(Sharding(nowhere, min_size=1), tree).values()) == {P()}


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("kernel", {"params/dense/kernel", "params/dense_kernel/kernel", "kernel"}),
        ("dense/kernel", {"params/dense/kernel"}),
        ("^kernel", {"kernel"}),
        ("^params/.*", {"params/dense/kernel", "params/dense_kernel/kernel", "params/dense/bias"}),
        ("(?i)DENSE/.*", {"params/dense/kernel", "params/dense/bias"}),
        (
            "dense.*|nothing",
            {"params/dense/kernel", "params/dense_kernel/kernel", "params/dense/bias"},
        ),
    ],
)
def test_a_pattern_matches_a_whole_name_or_its_end_from_a_slash_on(pattern, matched):
    tree = {
        "params": {
            "dense": {"kernel": shape(8), "bias": shape(8)},
            "dense_kernel": {"kernel": shape(8)},
        },
        "kernel": shape(8),
    }
    found = specs_by_name(Sharding([{"leaf": pattern, "axes": ["fsdp"]}]), tree)
    assert {name for name, spec in found.items() if spec == P("fsdp")} == matched


def test_axes_of_size_one_leave_no_trace():
    found = Sharding([{"leaf": "x", "axes": ["data", "fsdp+model", ""]}]).specs(
        {"x": shape(8, 8, 8)}, {"data": 1, "fsdp": 4, "model": 1}
    )
    assert found == {"x": P(None, "fsdp")}
    assert Sharding([KERNEL | {"leaf": "x"}]).specs({"x": shape(3, 3)}, AXES | {"model": 1}) == {
        "x": P()
    }


WRONG_FIT = "the rule for 'dense/kernel' does not fit leaf params/dense/kernel of shape [6, 9]: "


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            ["", "model"],
            "dimension 1, 9, does not divide over model=2; pad it to 10, "
            "or put a rule for this leaf before it",
        ),
        (
            ["fsdp+model"],
            "dimension 0, 6, does not divide over fsdp=4 x model=2; pad it to 8, "
            "or put a rule for this leaf before it",
        ),
        (["modle"], "there is no axis 'modle'; did you mean model?"),
        (["x"], "there is no axis 'x'; there are data, fsdp, model"),
        (["data", "data"], "it names the axis data twice"),
        (["data+data"], "it names the axis data twice"),
        (
            ["", "", "data"],
            "it has entries for 3 dimensions, the leaf has 2; put a rule for this leaf before it: ",
        ),
    ],
)
def test_a_rule_that_does_not_fit_names_the_leaf_and_the_way_out(axes, message):
    tree = {"params": {"dense": {"kernel": shape(6, 9)}}}
    with pytest.raises(ValueError, match=f"^{re.escape(WRONG_FIT + message)}"):
        Sharding([{"leaf": "dense/kernel", "axes": axes}]).specs(tree, AXES)


def test_the_rule_that_an_error_offers_is_one_that_works():
    tree = {"params": {"a.b": {"kernel-1": shape(6, 9)}, "a": {"kernel-1": shape(6, 8)}}}
    rule = {"leaf": ".*kernel-1", "axes": ["", "model"]}
    with pytest.raises(ValueError, match="put a rule for this leaf before it") as caught:
        Sharding([rule]).specs(tree, AXES)
    (leaf,) = re.findall(r"\{leaf = '(.*)', axes = \[\]\}", str(caught.value))
    found = Sharding([{"leaf": leaf, "axes": []}, rule]).specs(tree, AXES)
    assert found == {"params": {"a.b": {"kernel-1": P()}, "a": {"kernel-1": P(None, "model")}}}


def test_a_rule_that_matches_nothing_names_the_nearest_leaves():
    tree = {"params": {"dense": {"kernel": shape(8, 8), "bias": shape(8)}}}
    with pytest.raises(
        ValueError, match=r"the rule for 'dens/kernel' matches no leaf; there are dense/kernel"
    ):
        Sharding([{"leaf": "dens/kernel", "axes": []}]).specs(tree, AXES)
    with pytest.raises(
        ValueError,
        match=r"the rule for 'zzz' matches no leaf; there are params/dense/bias, params/",
    ):
        Sharding([{"leaf": "zzz", "axes": []}]).specs(tree, AXES)
    with pytest.raises(ValueError, match=r"the rule for 'zzz' matches no leaf$"):
        Sharding([{"leaf": "zzz", "axes": []}]).specs({}, AXES)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("dense/kernel", "rule 2 in rules must be like {leaf = "),
        ({"leaf": "x"}, "rule 2 in rules must be like {leaf = "),
        ({"leaf": "x", "axes": [], "spec": []}, "rule 2 in rules must be like {leaf = "),
        ({"leaf": 3, "axes": []}, "rule 2 in rules must be like {leaf = "),
        (
            {"leaf": "x", "axes": "model"},
            "axes of rule 2 in rules must be a list with an entry for each dim",
        ),
        ({"leaf": "x", "axes": [3]}, "an entry in axes of rule 2 in rules must be "),
        ({"leaf": "x", "axes": ["fsdp+"]}, "an entry in axes of rule 2 in rules must be "),
        ({"leaf": "x", "axes": [["fsdp", None]]}, "an entry in axes of rule 2 in rules must be "),
        (
            {"leaf": "(", "axes": []},
            "leaf of rule 2 in rules must be a regular expression, got '('",
        ),
    ],
)
def test_a_rule_that_cannot_be_read_is_told_at_once(rule, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Sharding([KERNEL, rule])


def test_min_size_is_a_number_of_elements():
    with pytest.raises(ValueError, match="min_size must be >= 1 element, got 0"):
        Sharding(min_size=0)


def test_zero1_splits_only_what_the_optimizer_keeps_but_rules_hold():
    state = abstract_state(adam(0.1)).replace(model_state={"memory": shape(512, 512)})
    found = specs_by_name(
        Sharding([{"leaf": "embedding", "axes": ["model"]}], zero1=True, min_size=2**14), state
    )
    assert found["params/embedding"] == found["averages/embedding"] == P("model")
    assert found["params/blocks/0/in/kernel"] == found["model_state/memory"] == P()
    assert (
        found["opt_state/slots/m/blocks/0/in/kernel"]
        == found["averages/blocks/0/in/kernel"]
        == P(None, "fsdp")
    )
    assert specs_by_name(Sharding(min_size=2**14), state)["model_state/memory"] == P("fsdp")


def test_leaves_that_cannot_be_split_are_named_with_the_way_out():
    tree = {
        "params": {"odd": shape(255, 333), "even": shape(256, 256), "prime": shape(65_537)},
        "b": shape(65_537),
    }
    reported = Sharding([{"leaf": "b", "axes": []}]).undivided(tree, AXES)
    assert reported == [
        "params/odd of shape [255, 333] is replicated on every device, "
        "as fsdp=4 divides none of its dimensions; "
        "pad 333 to 336, choose fsdp=3, or give it a rule",
        "params/prime of shape [65537] is replicated on every device, "
        "as fsdp=4 divides none of its dimensions; pad 65537 to 65540, or give it a rule",
    ]


LENGTHS = st.lists(st.integers(1, 48), max_size=4)


@given(
    st.dictionaries(st.sampled_from("abcdef"), LENGTHS, min_size=1),
    st.integers(1, 8),
    st.integers(1, 100),
)
def test_a_leaf_is_split_evenly_or_told_of_or_small(leaves, fsdp, min_size):
    tree = {name: shape(*lengths) for name, lengths in leaves.items()}
    sharding = Sharding(min_size=min_size)
    axes = {"data": 2, "fsdp": fsdp, "model": 1}
    specs = sharding.specs(tree, axes)
    reported = " ".join(sharding.undivided(tree, axes))
    sizes = dict(zip(sorted(tree), leaf_bytes_per_device(tree, specs, axes), strict=True))
    for name, leaf in tree.items():
        is_reported = f"{name} of shape {list(leaf.shape)}" in reported
        is_large = fsdp > 1 and leaf.ndim > 0 and leaf.size >= min_size
        assert is_reported == (is_large and specs[name] == P())
        if specs[name] == P():
            assert sizes[name] == 4 * leaf.size
            assert not is_large or all(length % fsdp for length in leaf.shape)
        else:
            assert is_large
            (dimension,) = [n for n, entry in enumerate(specs[name]) if entry]
            assert leaf.shape[dimension] == max(
                length for length in leaf.shape if length % fsdp == 0
            )
            assert sizes[name] * fsdp == 4 * leaf.size


def bytes_on(tree) -> dict[int, int]:
    """Return the bytes that the leaves take on each device."""
    found = dict.fromkeys((device.id for device in jax.devices()), 0)
    for leaf in jax.tree.leaves(tree):
        array = (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        for shard in array.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    return found


@pytest.mark.parametrize("optimizer", [adam(0.1), adam(0.1, packed=True), optax.adamw(0.1)])
@pytest.mark.parametrize(
    ("sizes", "sharding"),
    [
        ({"fsdp": 4}, Sharding(min_size=256)),
        ({"fsdp": 4}, Sharding(min_size=256, zero1=True)),
        (
            {"fsdp": 2, "model": 2},
            Sharding([{"leaf": "in/kernel", "axes": ["fsdp", "model"]}], min_size=256),
        ),
        ({"data": 2, "fsdp": 2}, Sharding([{"leaf": "embedding", "axes": ["data+fsdp"]}])),
    ],
)
def test_a_state_takes_on_each_device_what_was_computed(sizes, sharding, optimizer):
    mesh = make_mesh(**sizes)
    state = make_state(optimizer)
    placed = jax.device_put(state, sharding.shardings(state, mesh))
    expected = bytes_per_device(state, sharding.specs(state, mesh.shape), mesh.shape)
    assert set(bytes_on(placed).values()) == {expected}
    assert expected < count_bytes(state)


@pytest.mark.parametrize("optimizer", [adam(0.001), optax.adamw(0.001)])
def test_a_quarter_of_a_transformers_state_is_on_each_of_four_devices(optimizer):
    sharding = Sharding()
    mesh = make_mesh(fsdp=4)
    state = jax.jit(lambda: make_state(optimizer, width=256, vocabulary=4096, layers=2))()
    placed = jax.device_put(state, sharding.shardings(state, mesh))
    small = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.size < 65_536)
    assert max(bytes_on(placed).values()) <= 0.27 * count_bytes(state) + small
    assert small < 0.01 * count_bytes(state)
    assert sharding.undivided(state, mesh.shape) == []


@pytest.mark.standard_promotion  # optax.adam
@pytest.mark.parametrize(
    ("optimizer", "sizes", "sharding"),
    [
        (adam(0.01), {"fsdp": 4}, Sharding(min_size=256)),
        (optax.adamw(0.01), {"fsdp": 4}, Sharding(min_size=256, zero1=True)),
        (
            adam(0.01),
            {"fsdp": 2, "model": 2},
            Sharding([{"leaf": "kernel", "axes": ["fsdp", "model"]}], min_size=256),
        ),
    ],
)
def test_steps_over_a_split_state_give_the_numbers_of_a_whole_one(optimizer, sizes, sharding):
    mesh = make_mesh(**sizes)
    step = ftrain.make_step(loss_fn, optimizer, averages=0.9, clip_global_norm=1.0)
    rng = np.random.default_rng(0)
    batches = [{name: rng.integers(0, 256, 16) for name in "xy"} for _ in range(5)]
    start = jax.jit(lambda: make_state(optimizer, layers=4))()  # enough that some slots are packed
    layout = sharding.shardings(start, mesh)
    split = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    compiled = jax.jit(
        step, in_shardings=(layout, split), out_shardings=(layout, None), donate_argnums=0
    )
    whole = start
    placed = jax.device_put(start, layout)
    alone = jax.jit(step)
    before = bytes_on(placed)
    for batch in batches:
        whole, expected = alone(whole, batch)
        placed, found = compiled(placed, batch)
        chex.assert_trees_all_close(found, expected, rtol=1e-4)
    assert bytes_on(placed) == before
    assert all(
        jax.tree.leaves(jax.tree.map(lambda leaf, other: leaf.sharding == other, placed, layout))
    )
    chex.assert_trees_all_close(placed.params, whole.params, rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(placed.averages, whole.averages, rtol=1e-3, atol=1e-5)
