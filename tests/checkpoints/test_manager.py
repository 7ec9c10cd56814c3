import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from ftrain import TrainState
from ftrain.checkpoints import CheckpointError, CheckpointManager
from ftrain.cluster import make_mesh


def tree(value: float = 1.0):
    return {"w": jnp.full((4, 3), value), "nested": [jnp.arange(3), jnp.array(value, jnp.bfloat16)]}


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager(tmp_path / "checkpoints", keep=2) as manager:
        yield manager


def test_a_tree_comes_back_as_it_was(manager):
    manager.save(7, tree(2.5))
    assert_same(manager.restore(like=tree()), tree(2.5))


def test_a_train_state_with_its_key_and_named_tuples_comes_back(manager):
    state = TrainState.create(tree(), optax.adam(0.1), seed=11)
    manager.save(1, state)
    assert_same(manager.restore(like=TrainState.create(tree(0.0), optax.adam(0.1))), state)


def test_the_newest_are_kept_and_the_newest_is_restored(manager):
    for step in (1, 5, 20, 100):
        manager.save(step, tree(float(step)))
    manager.wait()
    assert manager.steps() == [20, 100]
    assert manager.latest() == 100
    assert_same(manager.restore(like=tree()), tree(100.0))
    assert_same(manager.restore(like=tree(), step=20), tree(20.0))


def test_a_save_does_not_see_later_writes(manager):
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    values = {"w": jnp.zeros((500, 500))}
    manager.save(1, values)
    for _ in range(5):
        values = step(values)
    assert_same(manager.restore(like=values), {"w": jnp.zeros((500, 500))})


def test_what_is_not_committed_is_not_there(manager):
    manager.save(1, tree())
    manager.wait()
    shutil.copytree(manager.directory / "1", manager.directory / "2")
    (manager.directory / "2" / "commit_success.txt").unlink()
    (manager.directory / "3.orbax-checkpoint-tmp").mkdir()
    assert manager.steps() == [1]


def test_leftovers_of_a_killed_process_are_swept_and_nothing_else(tmp_path):
    for name in ("3.orbax-checkpoint-tmp", "4.deleting", "2.suspect.deleting", "5.backup", "notes"):
        (tmp_path / name).mkdir()
    CheckpointManager(tmp_path).latest()
    assert len(list(tmp_path.iterdir())) == 5  # looking changes nothing
    with CheckpointManager(tmp_path) as manager:
        manager.save(6, tree())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".catalog.lock",
        ".writer.lock",
        "5.backup",
        "6",
        "checkpoints.json",
        "notes",
    ]


def test_a_directory_without_its_commit_file_is_put_aside(manager):
    (manager.directory / "1").mkdir(parents=True)
    (manager.directory / "1" / "precious").write_text("kept")
    manager.save(1, tree())
    assert_same(manager.restore(like=tree()), tree())
    assert (manager.directory / "1.incomplete" / "precious").exists()


def test_numpy_arrays_keep_their_64_bits(manager):
    precise = {"f": np.array([1 / 3]), "i": np.array([2**40 + 1])}
    manager.save(1, precise)
    assert_same(manager.restore(like=precise), precise)


def test_plain_numbers_come_back_with_all_their_bits(manager):
    numbers = {
        "int": 2**40 + 1,
        "float": 1 / 3,
        "bool": True,
        "complex": 2j,
        "none": None,
        "numpy": np.float64(0.1),
    }
    manager.save(1, numbers)
    restored = manager.restore(like=numbers)
    assert restored == numbers
    assert [type(restored[name]) for name in ("int", "float", "bool", "complex")] == [
        int,
        float,
        bool,
        complex,
    ]
    with pytest.raises(
        CheckpointError, match=f"leaf big is {2**70}, which needs more than 64 bits"
    ):
        manager.save(2, {"big": 2**70})


@pytest.mark.parametrize(
    "leaf", ["hi", np.array(["a"]), object()], ids=["str", "array of str", "object"]
)
def test_what_cannot_be_saved_is_named(manager, leaf):
    with pytest.raises(CheckpointError, match="leaf nested/0 is a"):
        manager.save(1, {"nested": [leaf]})
    assert manager.steps() == []


def test_outside_of_with_a_save_is_complete_when_it_returns(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, tree())
    assert CheckpointManager(tmp_path).steps() == [1]


def test_a_checkpoint_is_never_written_over(manager):
    manager.save(1, tree(1.0))
    with pytest.raises(CheckpointError, match="1 exists already"):
        manager.save(1, tree(2.0))
    assert_same(manager.restore(like=tree()), tree(1.0))


def test_a_step_that_is_not_there_lists_those_that_are(manager):
    with pytest.raises(CheckpointError, match="there is no checkpoint yet"):
        manager.restore(like=tree())
    manager.save(3, tree())
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4; there are \[3\]"):
        manager.restore(like=tree(), step=4)


def test_another_tree_is_refused_with_every_difference(manager):
    manager.save(3, tree())
    other = {"w": jnp.zeros((4, 5)), "nested": [jnp.arange(3.0)], "bias": jnp.zeros(2)}
    with pytest.raises(CheckpointError) as caught:
        manager.restore(like=other)
    message = str(caught.value)
    assert "checkpoints/3 does not fit" in message
    assert "leaf bias is missing" in message
    assert "leaf nested/1 is not expected" in message
    assert "leaf w is float32[4, 3], expected float32[4, 5]" in message
    assert "leaf nested/0 is int32[3], expected float32[3]" in message


def test_restoring_places_leaves_where_they_are_wanted(manager):
    manager.save(1, tree(3.0))
    sharding = NamedSharding(make_mesh(4), PartitionSpec("data"))
    like = jax.tree.map(jnp.copy, tree()) | {"w": jax.device_put(jnp.zeros((4, 3)), sharding)}
    restored = manager.restore(like=like)
    assert restored["w"].sharding == sharding
    np.testing.assert_array_equal(restored["w"], np.full((4, 3), 3.0))


@pytest.mark.filterwarnings(
    "ignore:Sharding info not provided"
)  # plain Orbax is given no target here
def test_plain_orbax_reads_what_we_write(manager):
    manager.save(1, {"w": jnp.arange(4.0)})
    manager.wait()
    np.testing.assert_array_equal(ocp.load(manager.directory / "1")["w"], np.arange(4.0))


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be a whole number >= 1"):
        CheckpointManager(tmp_path, keep=0)


@pytest.mark.parametrize("step", [np.int64(7), jnp.int32(7), np.array(7)])
def test_a_step_may_be_a_number_of_numpy_or_jax(manager, step):
    manager.save(step, tree())
    manager.wait()
    assert manager.steps() == [7]


@pytest.mark.parametrize("step", [-1, 2.5, "x", True, None])
def test_a_step_that_is_no_number_is_refused(manager, step):
    with pytest.raises(CheckpointError, match="a step must be a whole number >= 0"):
        manager.save(step, tree())


def test_an_empty_tree_is_refused(manager):
    with pytest.raises(CheckpointError, match="the tree has no leaves"):
        manager.save(1, {})


def test_deleting_what_is_not_there_is_refused(manager):
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 7"):
        manager.delete(7)
