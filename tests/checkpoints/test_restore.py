"""Restore: into which tree, onto which devices, and from which files."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp_v0
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from ftrain.checkpoints import CheckpointError, CheckpointManager, LeafMismatchError, load_variable
from ftrain.cluster import make_mesh


def tree(value: float = 1.0):
    return {
        "encoder": {"w": jnp.full((4, 3), value), "b": jnp.full(3, value)},
        "head": [jnp.full(2, value)],
    }


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        yield manager


def flat(tree) -> list[list[float]]:
    return [np.asarray(leaf).reshape(-1).tolist() for leaf in jax.tree.leaves(tree)]


def test_every_difference_is_told_in_one_error(manager):
    manager.save(1, {f"leaf{n}": jnp.ones(n + 1) for n in range(20)})
    like = {f"leaf{n}": jnp.ones(n + 2) for n in range(5, 20)} | {"new": jnp.ones(1)}
    with pytest.raises(LeafMismatchError) as caught:
        manager.restore(like=like)
    assert caught.value.differences == [
        "leaf new is missing",
        *(f"leaf leaf{n} is not expected" for n in range(5)),
        *(
            f"leaf leaf{n} is float32[{n + 1}], expected float32[{n + 2}]"
            for n in sorted(range(5, 20), key=str)
        ),
    ]
    for phrase in caught.value.differences:
        assert phrase in str(caught.value)


def test_without_strictness_what_fits_is_taken_and_the_rest_keeps_its_value(manager):
    manager.save(1, tree(1.0) | {"extra": jnp.ones(2)})
    like = {"encoder": {"w": jnp.full((4, 3), 7.0), "b": jnp.full(5, 7.0)}, "new": jnp.full(1, 7.0)}
    restored = manager.restore(like=like, strict=False)
    assert flat(restored) == [[7.0] * 5, [1.0] * 12, [7.0]]


def test_patterns_choose_what_is_taken(manager):
    manager.save(1, tree(1.0))
    assert flat(manager.restore(like=tree(7.0), include=["encoder/.*"])) == [
        [1.0] * 3,
        [1.0] * 12,
        [7.0] * 2,
    ]
    assert flat(manager.restore(like=tree(7.0), exclude=[".*/b"])) == [
        [7.0] * 3,
        [1.0] * 12,
        [1.0] * 2,
    ]
    like = tree(7.0) | {"head": [jnp.full(9, 7.0)]}  # leaves that are not selected need not fit
    assert flat(manager.restore(like=like, exclude=["head/0"])) == [
        [1.0] * 3,
        [1.0] * 12,
        [7.0] * 9,
    ]
    with pytest.raises(LeafMismatchError, match="leaf encoder/b is missing"):
        manager.restore(like=tree(), include=["encoder/b"], rename={"/b$": "/c"})


def test_names_are_changed_by_patterns(manager):
    manager.save(1, tree(1.0))
    like = {"backbone": {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}, "logits": {"0": jnp.zeros(2)}}
    restored = manager.restore(
        like=like, rename={"^encoder/": "backbone/", r"head/(\d)": r"logits/\1"}
    )
    assert flat(restored) == [[1.0] * 3, [1.0] * 12, [1.0] * 2]
    with pytest.raises(CheckpointError, match="leaves encoder/b and encoder/w would both be x"):
        manager.restore(like=like, rename={"encoder/.": "x"})


def test_nothing_taken_is_a_mistake(manager):
    manager.save(1, tree())
    with pytest.raises(
        CheckpointError, match=r"pattern 'encode/\.\*' matches no leaf; there are encoder/b"
    ):
        manager.restore(like=tree(), include=["encoder/.*", "encode/.*"])
    with pytest.raises(CheckpointError, match=r"rename pattern '\^encode/' matches no leaf"):
        manager.restore(like=tree(), rename={"^encode/": "x/"})
    with pytest.raises(LeafMismatchError, match="none of its 3 leaves is selected"):
        manager.restore(like=tree(), exclude=".*")
    with pytest.raises(CheckpointError, match="is not a regular expression"):
        manager.restore(like=tree(), include=["("])


def test_a_leaf_without_a_value_cannot_keep_it(manager):
    manager.save(1, tree())
    like = jax.eval_shape(tree)
    assert flat(manager.restore(like=like)) == flat(tree())
    with pytest.raises(
        CheckpointError, match="leaf head/0 is not restored, and `like` has no value for it to keep"
    ):
        manager.restore(like=like, exclude=["head/.*"])


def test_numbers_change_their_dtype_on_request_only(manager):
    value = jnp.linspace(0, 1, 7)
    manager.save(1, {"x": value, "n": jnp.arange(3)})
    like = {"x": jnp.zeros(7, jnp.bfloat16), "n": jnp.zeros(3, jnp.int32)}
    with pytest.raises(LeafMismatchError, match=r"leaf x is float32\[7\], expected bfloat16\[7\]"):
        manager.restore(like=like)
    restored = manager.restore(like=like, cast=True)
    assert restored["x"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(restored["x"], value.astype(jnp.bfloat16))


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 4), (4, 1), (4, 2), (2, 4)])
def test_another_number_of_devices(manager, saved_on, restored_on):
    value = jnp.arange(48.0).reshape(8, 6)

    def shard(array, devices, spec):
        return jax.device_put(array, NamedSharding(make_mesh(devices), PartitionSpec(*spec)))

    manager.save(1, {"rows": shard(value, saved_on, ["data"]), "all": shard(value, saved_on, [])})
    like = {
        "rows": shard(
            jnp.zeros((8, 6)), restored_on, [None, "data"] if restored_on == 2 else ["data"]
        )
    }
    like["all"] = shard(jnp.zeros((8, 6)), restored_on, [])
    restored = manager.restore(like=like)
    for name in like:
        assert restored[name].sharding == like[name].sharding
        np.testing.assert_array_equal(restored[name], value)


def test_what_a_leaf_is_spread_over_does_not_change_its_digest(manager):
    value = jnp.arange(48.0).reshape(8, 6)
    manager.save(1, {"x": value})
    manager.save(
        2, {"x": jax.device_put(value, NamedSharding(make_mesh(4), PartitionSpec("data")))}
    )
    manager.wait()
    texts = [(manager.directory / f"{step}" / "manifest.json").read_text() for step in (1, 2)]
    assert len({text.partition('"leaves"')[2].partition("not_finite")[0] for text in texts}) == 1


EVERY_KIND = {
    "bfloat16": np.arange(-3, 3).astype(ml_dtypes.bfloat16),
    "float8": np.arange(-3, 3).astype(ml_dtypes.float8_e4m3fn),
    "float16": np.arange(6, dtype=np.float16),
    "float64": np.array([1 / 3]),
    "int8": np.array([-128, 127], np.int8),
    "uint64": np.array([2**64 - 1], np.uint64),
    "bool": np.array([[True, False]]),
    "complex": np.array([1 + 2j], np.complex64),
    "scalar": np.array(3, np.int16),
    "empty": np.zeros((0, 4), np.float32),
    "strided": np.arange(20.0)[::2],
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


def test_every_kind_of_array_comes_back(manager):
    manager.save(1, EVERY_KIND)
    restored = manager.restore(like=EVERY_KIND)
    for name, wanted in EVERY_KIND.items():
        assert restored[name].dtype == wanted.dtype, name
        np.testing.assert_array_equal(restored[name], wanted)
        np.testing.assert_array_equal(load_variable(manager.directory, name), wanted)


def test_keys_of_every_kind_come_back(manager):
    keys = {
        impl: jax.random.split(jax.random.key(7, impl=impl), 3)
        for impl in ("threefry2x32", "rbg", "unsafe_rbg")
    }
    manager.save(1, keys)
    restored = manager.restore(like=jax.eval_shape(lambda: keys))
    for impl, key in keys.items():
        assert restored[impl].dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(restored[impl]), jax.random.key_data(key))


@pytest.mark.parametrize(
    "keys", [{"a.b": 1, "a": {"b": 2}}, {"a/b": 1, "a": {"b": 2}}, {"a/b": 1, "a.b": 2}]
)
def test_leaves_that_would_share_a_name_on_disk_are_refused(manager, keys):
    with pytest.raises(CheckpointError, match="have the same name on disk"):
        manager.save(1, jax.tree.map(jnp.float32, keys))


def test_keys_with_dots_and_slashes_come_back(manager):
    odd = {"a.b": jnp.ones(1), "c/d": {"e f": jnp.ones(2), "ü%": jnp.ones(3)}}
    manager.save(1, odd)
    assert flat(manager.restore(like=odd)) == flat(odd)


def test_steps_that_write_over_the_state_do_not_change_what_is_being_saved(manager):
    """Donated arrays, and numpy arrays that the caller overwrites while the save is pending."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = {f"{n}": jnp.zeros(100_000) for n in range(20)}
    own = np.zeros(100_000)
    manager.save(1, {"state": state, "own": own})
    own += 1
    for _ in range(20):
        state = step(state)
    restored = manager.restore(like={"state": state, "own": own})
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(restored))


@pytest.mark.filterwarnings(
    "ignore:Sharding info not provided"
)  # plain Orbax is given no target here
def test_plain_orbax_reads_what_we_write(manager):
    state = tree(3.0) | {"rng": jax.random.key(5), "half": jnp.ones(2, jnp.bfloat16)}
    manager.save(1, state)
    manager.wait()
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    with_target, without = (
        ocp.load(manager.directory / "1", like),
        ocp.load(manager.directory / "1"),
    )
    for read in (with_target, without):
        assert (
            jax.random.key_data(read.pop("rng")).tolist()
            == jax.random.key_data(jax.random.key(5)).tolist()
        )
        assert flat(read) == flat({name: leaf for name, leaf in state.items() if name != "rng"})


@pytest.mark.parametrize(
    "options", [{}, {"use_zarr3": False}, {"use_ocdbt": False}, {"use_compression": False}]
)
def test_what_plain_orbax_wrote_is_restored(manager, options):
    context = ocp.Context()
    for name, value in options.items():
        setattr(context.array.saving, name, value)
    state = tree(3.0) | {"rng": jax.random.key(5)}
    with context:
        ocp.save(manager.directory / "4", state)
    assert manager.steps() == [4]
    restored = manager.restore(like=tree() | {"rng": jax.random.key(0)})
    assert (
        jax.random.key_data(restored.pop("rng")).tolist()
        == jax.random.key_data(jax.random.key(5)).tolist()
    )
    assert flat(restored) == flat(tree(3.0))
    with pytest.raises(
        LeafMismatchError, match=r"leaf encoder/b is float32\[3\], expected float32\[9\]"
    ):
        manager.restore(
            like=tree()
            | {"rng": jax.random.key(0), "encoder": {"w": jnp.ones((4, 3)), "b": jnp.ones(9)}}
        )


def test_what_the_first_orbax_wrote_is_restored(tmp_path):
    with ocp_v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old" / "9", tree(3.0))
    np.testing.assert_array_equal(
        load_variable(tmp_path / "old" / "9", "encoder/w"), np.full((4, 3), 3.0)
    )


def test_a_directory_of_the_first_orbaxs_manager_is_gone_on_with(tmp_path):
    with ocp_v0.CheckpointManager(tmp_path) as theirs:
        theirs.save(3, args=ocp_v0.args.StandardSave(tree(3.0)))
    manager = CheckpointManager(tmp_path)
    assert flat(manager.restore(like=tree())) == flat(tree(3.0))
    manager.save(4, tree(4.0))
    assert manager.steps() == [3, 4]


def test_what_plain_orbax_wrote_is_never_deleted(manager):
    ocp.save(manager.directory / "1", tree())
    for step in range(2, 9):
        manager.save(step, tree())
    manager.wait()
    assert manager.steps() == [1, 6, 7, 8]


def test_a_state_that_is_not_finite_is_put_aside(manager):
    manager.save(1, tree(1.0))
    for step, bad in ((2, jnp.nan), (3, jnp.inf)):
        manager.save(step, tree(1.0) | {"head": [jnp.array([1.0, bad])]})
        with pytest.warns(
            UserWarning, match=rf"{step}\.suspect has non-finite leaves: head/0; it was set aside"
        ):
            manager.wait()
    assert manager.steps() == [1]
    assert manager.latest() == 1
    assert (manager.directory / "2.suspect" / "manifest.json").exists()
    assert np.isnan(load_variable(manager.directory / "2.suspect", "head/0")[1])
    manager.save(4, tree(4.0))
    assert flat(manager.restore(like=tree())) == flat(tree(4.0))


def test_suspects_do_not_fill_the_disk_and_evict_nothing(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2, on_warning=lambda text: None)
    manager.save(1, tree())
    manager.save(2, tree())
    for step in range(3, 9):
        manager.save(step, {"x": jnp.array(jnp.nan, jnp.bfloat16)})
    assert manager.steps() == [1, 2]
    assert {path.name for path in tmp_path.glob("*.suspect")} == {
        "3.suspect",
        "8.suspect",
    }  # the first and the newest


def test_leaves_may_be_nonfinite_where_one_says_so(tmp_path):
    manager = CheckpointManager(tmp_path, allow_nonfinite=[".*best"])
    manager.save(1, {"best": jnp.array(jnp.inf), "w": jnp.ones(2)})
    assert manager.steps() == [1]
