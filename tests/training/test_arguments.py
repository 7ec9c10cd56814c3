"""Invalid arguments of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import init_params, loss_fn

import ftrain
from ftrain import TrainState
from ftrain.optimizers import adam


def stand_in(module: str, name: str, **fields):
    """Make an object like those of a library that may be missing; its fields are a pytree."""
    base = type(name, (), {"__module__": module})
    cls = type("Mine", (base,), {"__module__": "mine"})
    names = tuple(fields)
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda made: ([(jax.tree_util.GetAttrKey(key), getattr(made, key)) for key in names], None),
        lambda _, children: children,
    )
    made = cls()
    vars(made).update(fields)
    return made


def test_params_with_leaves_that_are_no_arrays_name_them_and_the_way_out(pipeline, tmp_path):
    model = stand_in(
        "equinox._module._module",
        "Module",
        axis="batch",
        act=jnp.tanh,
        weight=jnp.ones(3),
        bias=None,
    )
    expected = (
        r"params is a model of equinox \(Mine\), expected a tree of arrays; "
        r"pass ftrain.models.equinox\(model\)"
    )
    with pytest.raises(TypeError, match=expected):
        ftrain.train(
            loss_fn, model, pipeline, optimizer=adam(0.1), steps=1, directory=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match=expected):
        TrainState.create(model, adam(0.1))
    with pytest.raises(
        TypeError,
        match=r"model_state must be a tree of arrays: leaf model_state/a is a str, 'x'; pass",
    ):
        TrainState.create(init_params(), adam(0.1), model_state={"a": "x"})


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (
            "flax.training.train_state",
            "TrainState",
            r"is a flax.training.train_state.TrainState \(Mine\), expected a tree",
        ),
        (
            "flax.nnx.module",
            "Module",
            r"is a model of flax.nnx \(Mine\).*pass ftrain.models.nnx\(model\)",
        ),
        (
            "flax.linen.module",
            "Module",
            r"is a model of flax.linen .*pass ftrain.models.linen\(model, example_inputs\)",
        ),
        (
            "haiku._src.transform",
            "TransformedWithState",
            r"is a model of haiku .*pass ftrain.models.haiku\(function, example_inputs\)",
        ),
        (
            "flax.nnx.training.optimizer",
            "Optimizer",
            r"is a flax.nnx.Optimizer .*pass ftrain.models.nnx\(model\), and its `tx`",
        ),
    ],
)
def test_objects_of_libraries_are_called_what_they_are(pipeline, module, name, expected):
    with pytest.raises(TypeError, match=expected):
        ftrain.train(
            loss_fn, stand_in(module, name, w=jnp.ones(3)), pipeline, optimizer=adam(0.1), steps=1
        )


def test_a_state_in_the_place_of_params_is_refused(pipeline):
    with pytest.raises(
        TypeError,
        match=r"params is a ftrain.TrainState .*pass its `params`; to continue from a state",
    ):
        ftrain.train(
            loss_fn,
            TrainState.create(init_params(), adam(0.1)),
            pipeline,
            optimizer=adam(0.1),
            steps=1,
        )


def test_a_state_of_flax_in_the_place_of_a_state_is_refused(pipeline):
    state = stand_in("flax.training.train_state", "TrainState", params=jnp.ones(3))
    step = ftrain.make_step(loss_fn, adam(0.1))
    with (
        pytest.raises(TypeError, match=r"got flax's TrainState; make ftrain's"),
        ftrain.Run(step, state, pipeline),
    ):
        pass


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (np.array(["a"]), "leaf params/w is an array of <U1"),
        (np.array([None]), "leaf params/w is an array of object"),
        ("float32", "leaf params/w is a str, 'float32'"),
        (jnp.float32, "leaf params/w is a "),
        (object(), "leaf params/w is a object"),
    ],
)
def test_other_leaves_are_refused(leaf, expected):
    with pytest.raises(TypeError, match=expected):
        TrainState.create({"w": leaf}, adam(0.1))


def test_arrays_numbers_and_none_are_leaves():
    params = {
        "a": np.ones(2),
        "b": 1.0,
        "c": None,
        "d": jnp.ones((), jnp.bfloat16),
        "e": np.float32(2),
    }
    assert (
        len(jax.tree.leaves(TrainState.create(params, optax.sgd(0.1), seed=np.int64(3)).params))
        == 4
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adam, r"got the function adam: call it, adam\(...\)"),
        (0.1, "must be an optax.GradientTransformation, got 0.1"),
    ],
)
def test_what_is_no_optimizer_is_refused(pipeline, optimizer, expected):
    with pytest.raises(TypeError, match=expected):
        ftrain.train(loss_fn, init_params(), pipeline, optimizer=optimizer, steps=1)
    with pytest.raises(TypeError, match=expected):
        TrainState.create(init_params(), optimizer)


def test_a_model_of_equinox_trains_once_it_is_partitioned(pipeline):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    with pytest.raises(
        TypeError, match=r"is a model of equinox \(MLP\).*ftrain.models.equinox\(model\)"
    ):
        ftrain.train(loss_fn, model, pipeline, optimizer=adam(0.1), steps=1)
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params, batch, rng):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(batch["x"]) - batch["y"]) ** 2)

    assert int(ftrain.train(loss, params, pipeline, optimizer=adam(0.1), steps=2).step) == 2


def test_a_module_of_nnx_is_refused_and_trains_once_it_is_split(pipeline):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"is a model of flax.nnx \(Linear\)"):
        ftrain.train(loss_fn, model, pipeline, optimizer=adam(0.1), steps=1)
    graphdef, params = nnx.split(model)

    def loss(params, batch, rng):
        return jnp.mean((nnx.merge(graphdef, params)(batch["x"])[:, 0] - batch["y"]) ** 2)

    assert int(ftrain.train(loss, params, pipeline, optimizer=adam(0.1), steps=2).step) == 2
