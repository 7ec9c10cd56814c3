"""Every library's model behaves the same as a `Model`; and what is special about each of them."""

import functools
import subprocess
import sys
import warnings

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state
from nets import MAKE, EquinoxNet, LinenNet, NnxNet, X, haiku_net

import ftrain
from ftrain import models
from ftrain.data import ArraySource, Pipeline
from ftrain.tree import named_leaves

pytestmark = pytest.mark.standard_promotion  # the libraries mix dtypes
KEY = jax.random.key(5)
HIDDEN = {"nnx": "layers/0/kernel", "linen": "Dense_0/kernel", "equinox": "hidden/weight"}


@pytest.fixture(params=MAKE)
def model(request):
    return MAKE[request.param]()


def equal(left, right):
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


def test_init_is_a_pure_function_of_the_key(model, request):
    variables = model.init(KEY)
    assert equal(variables, model.init(KEY))
    assert equal(variables, jax.jit(model.init)(KEY))
    shapes = jax.eval_shape(model.init, KEY)
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)
    is_instance = "instance" in request.node.name
    assert equal(variables[0], model.init(jax.random.key(6))[0]) == is_instance


def test_training_uses_the_rng_and_changes_the_model_state(model):
    params, before = model.init(KEY)
    apply = jax.jit(functools.partial(model.apply, train=True))
    outputs, after = apply(params, before, X, rng=KEY)
    assert outputs.shape == (8, 2)
    assert equal((outputs, after), apply(params, before, X, rng=KEY))
    others, same_statistics = apply(params, before, X, rng=jax.random.key(6))
    assert not equal(outputs, others)
    assert equal(after, same_statistics)
    assert not equal(before, after)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert [leaf.dtype for leaf in jax.tree.leaves(before)] == [
        leaf.dtype for leaf in jax.tree.leaves(after)
    ]


def test_evaluation_draws_nothing_and_changes_nothing(model):
    params, before = model.init(KEY)
    _, trained = model.apply(params, before, X, rng=KEY, train=True)
    outputs, after = model.apply(params, trained, X)
    assert equal(after, trained)
    assert equal(outputs, model.apply(params, trained, X, rng=KEY)[0])
    # The statistics are those of the state, so an example does not depend on its batch.
    np.testing.assert_allclose(outputs[:1], model.apply(params, trained, X[:1])[0], rtol=1e-5)
    assert not np.allclose(outputs, model.apply(params, before, X)[0])


def test_all_parameters_have_gradients(model):
    params, state = model.init(KEY)

    def loss(params):
        return jnp.sum(model.apply(params, state, X, rng=KEY, train=True)[0] ** 2)

    gradients = named_leaves(jax.grad(loss)(params))
    weights = {name: value for name, value in gradients.items() if value.ndim > 1}
    assert all(np.abs(value).max() > 0 for value in weights.values())


def test_a_model_unpacks(model):
    params, model_state, apply = model
    assert equal(params, model.params)
    assert equal(model_state, model.model_state)
    assert apply(params, model_state, X)[0].shape == (8, 2)


def test_variables_are_dicts_with_the_names_of_the_library():
    for name, expected in HIDDEN.items():
        assert expected in named_leaves(MAKE[name]().params)
    assert "linear/w" in named_leaves(MAKE["haiku"]().params)
    assert [*named_leaves(MAKE["nnx"]().model_state)] == ["norm/mean", "norm/var"]
    assert [*MAKE["linen"]().model_state] == ["batch_stats"]  # and no intermediates
    assert [*named_leaves(MAKE["equinox"]().model_state)] == [
        "buffers/order",
        "state/norm.batch_counter",
        "state/norm.batch_state_index/0",
        "state/norm.batch_state_index/1",
    ]


def test_variables_may_be_put_together_from_the_names_of_leaves(model):
    """As they are when a checkpoint is read without the code of the model."""

    def nested(tree):
        found = {}
        for name, leaf in named_leaves(tree).items():
            *scopes, own = name.split("/")
            functools.reduce(lambda node, key: node.setdefault(key, {}), scopes, found)[own] = leaf
        return found

    params, state = model.init(KEY)
    outputs, after = model.apply(params, state, X, rng=KEY, train=True)
    again, found = model.apply(nested(params), nested(state), X, rng=KEY, train=True)
    assert equal((outputs, after), (again, found))


def test_train_takes_a_model_as_a_config_does(model):
    data = Pipeline(ArraySource({"x": X, "y": np.arange(8) % 2}), batch_size=4)

    def loss_fn(params, batch, rng, model_state):
        logits, model_state = model.apply(params, model_state, batch["x"], rng=rng, train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), {}, model_state

    adam = ftrain.optimizers.adam(0.1)
    state = ftrain.train(loss_fn, model, data, optimizer=adam, steps=3, seed=4, hooks=[])
    first = ftrain.TrainState.create(model, adam, seed=4)
    init_rng, step_rng = jax.random.split(jax.random.key(4))
    assert equal((first.params, first.model_state), model.init(init_rng))
    assert np.array_equal(*map(jax.random.key_data, (first.rng, step_rng)))
    assert np.array_equal(*map(jax.random.key_data, (state.rng, step_rng)))
    assert not equal(first.model_state, state.model_state)
    assert not equal(first.params, state.params)


# Without a state.


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.nnx(lambda rngs: nnx.Linear(3, 2, rngs=rngs)),
        lambda: models.linen(linen.Dense(2), X),
        lambda: models.equinox(lambda key: eqx.nn.MLP(3, 2, 4, 1, key=key)),
        lambda: models.equinox(eqx.nn.Linear(3, 2, key=KEY), vmap=True),
        lambda: models.haiku(hk.transform(lambda x: hk.Linear(2)(x)), X),
        lambda: models.haiku(lambda x: hk.Linear(2)(x), X),
    ],
    ids=["nnx", "linen", "equinox", "equinox instance", "haiku", "haiku function"],
)
def test_a_model_without_a_state_has_none(make, pipeline):
    model = make()
    assert model.model_state is None
    outputs, after = model.apply(model.params, None, X)
    assert outputs.shape == (8, 2)
    assert after is None

    def loss_fn(params, batch, rng):
        return jnp.mean((model.apply(params, None, batch["x"])[0][:, 0] - batch["y"]) ** 2)

    state = ftrain.train(loss_fn, model, pipeline, optimizer=optax.sgd(0.1), steps=2)
    assert state.model_state is None
    with pytest.raises(TypeError, match="a fourth argument needs a model that has one"):
        ftrain.train(
            lambda params, batch, rng, model_state: 0.0,
            model,
            pipeline,
            optimizer=optax.sgd(0.1),
            steps=2,
        )


# nnx


def test_the_users_module_of_nnx_is_not_changed():
    module = NnxNet(nnx.Rngs(0))
    module.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)))
    model = models.nnx(module)
    params, state = model.init(KEY)
    model.apply(params, state, X, rng=KEY, train=True)
    assert module.dropout.deterministic
    assert equal(before, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)))
    np.testing.assert_array_equal(params["out"]["kernel"], module.out.kernel[...])
    np.testing.assert_array_equal(model.apply(params, state, X)[0], module(X))


def test_random_streams_of_nnx_are_not_carried_and_need_a_key_to_train():
    model = MAKE["nnx"]()
    assert not any("rng" in name or "dropout" in name for name in named_leaves(model.model_state))
    with pytest.raises(ValueError, match=r"has random streams.*rng="):
        model.apply(model.params, model.model_state, X, train=True)


class Odd(nnx.Module):
    """Shared layers, a plain array, a number that changes, a flag and streams as arguments."""

    def __init__(self, width, *, rngs):
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.again = self.first
        self.scale = jnp.full(width, 2.0)
        self.calls = nnx.Variable(0)
        self.lora = nnx.LoRA(width, 1, width, base_module=self.first, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, train, rngs=None):
        self.calls[...] = self.calls[...] + 1
        x = self.again(self.lora(x)) * self.scale
        return self.dropout(x, rngs=rngs) if train else x


@pytest.mark.parametrize(
    "make",
    [functools.partial(Odd, 3), lambda rngs: Odd(3, rngs=rngs), Odd(3, rngs=nnx.Rngs(0))],
    ids=["class", "function", "instance"],
)
def test_odd_modules_of_nnx(make):
    model = models.nnx(make)
    assert [*named_leaves(model.params)] == [
        "again/bias",  # shared with first
        "again/kernel",
        "lora/lora_a",
        "lora/lora_b",
    ]
    assert [*named_leaves(model.model_state)] == ["calls", "scale"]
    outputs, state = model.apply(model.params, model.model_state, X, rng=KEY, train=True)
    assert int(state["calls"]) == 1
    assert 0 < np.sum(np.asarray(outputs) == 0) < outputs.size
    assert int(model.apply(model.params, state, X)[1]["calls"]) == 2


def test_only_some_variables_of_nnx_are_trained():
    model = models.nnx(functools.partial(Odd, 3), wrt=nnx.LoRAParam)
    assert [*named_leaves(model.params)] == ["lora/lora_a", "lora/lora_b"]
    assert "again/kernel" in named_leaves(model.model_state)
    _, state = model.apply(model.params, model.model_state, X, rng=KEY, train=True)
    assert jax.tree.structure(state) == jax.tree.structure(model.model_state)


def test_intermediates_of_nnx_are_dropped():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.sow(nnx.Intermediate, "x", x)
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        used = Sowing(nnx.Rngs(0))
        used(X)
        model = models.nnx(used)
        assert model.apply(model.params, None, X)[1] is None
    assert hasattr(used, "x")  # the user's own


# linen


class Field(linen.Module):
    train: bool = True

    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=not self.train)(x)


class Named(linen.Module):
    @linen.compact
    def __call__(self, x, stochastic=False):
        if stochastic:
            x = linen.Dense(3, name="only_in_training")(x)
        noise = jax.random.normal(self.make_rng("noise"), x.shape) if stochastic else 0.0
        return linen.Dropout(0.5, deterministic=not stochastic)(x + noise)


@pytest.mark.parametrize(
    ("module", "chosen"),
    [
        (Field(), None),
        (Named(), "stochastic"),
        (linen.Dropout(0.5), None),
        (linen.Dropout(0.5, deterministic=True), None),
    ],
    ids=["field", "named", "argument", "field and argument"],
)
def test_the_flag_of_linen_is_an_argument_or_a_field(module, chosen):
    model = models.linen(module, X, train_argument=chosen)
    params, state = model.init(KEY)
    outputs, _ = model.apply(params, state, X, rng=KEY, train=True)
    assert 0 < np.sum(np.asarray(outputs) == 0) < outputs.size
    np.testing.assert_array_equal(model.apply(params, state, X)[0], X)


def test_boxes_of_linen_are_opened():
    kernel = linen.with_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
    model = models.linen(linen.Dense(2, kernel_init=kernel), X)
    assert [*named_leaves(model.params)] == ["bias", "kernel"]
    assert model.apply(model.params, None, X)[0].shape == (8, 2)


def test_caches_of_linen_change_in_evaluation_too():
    class Counting(linen.Module):
        @linen.compact
        def __call__(self, x):
            count = self.variable("cache", "count", lambda: jnp.zeros((), jnp.int32))
            if not self.is_initializing():
                count.value += 1
            return x

    model = models.linen(Counting(), X)
    _, state = model.apply(*model.init(KEY), X)
    assert int(state["cache"]["count"]) == 1


# equinox


def test_a_model_of_equinox_may_take_whole_batches():
    class Whole(eqx.Module):
        linear: eqx.nn.Linear
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            self.linear = eqx.nn.Linear(3, 2, key=key)
            self.dropout = eqx.nn.Dropout(0.5)

        def __call__(self, x, key=None):
            assert x.ndim == 2
            return self.dropout(jax.vmap(self.linear)(x), key=key)

    model = models.equinox(Whole, vmap=False)
    outputs, _ = model.apply(model.params, None, X, rng=KEY, train=True)
    assert np.any(np.asarray(outputs) == 0)
    assert not np.any(np.asarray(model.apply(model.params, None, X)[0]) == 0)


def test_each_example_of_equinox_has_its_own_key():
    model = models.equinox(eqx.nn.Dropout(0.5))
    outputs, _ = model.apply({}, None, jnp.ones((16, 8)), rng=KEY, train=True)
    assert len(np.unique(np.asarray(outputs), axis=0)) > 8


@pytest.mark.parametrize(
    "make", [EquinoxNet, eqx.nn.make_with_state(EquinoxNet)], ids=["class", "make_with_state"]
)
def test_a_state_of_equinox_is_found(make):
    assert "state" in models.equinox(make).model_state


def test_a_state_of_equinox_that_is_missing_is_asked_for():
    net, state = eqx.nn.make_with_state(EquinoxNet)(KEY)
    with pytest.raises(ValueError, match=r"has a state: pass it too, ftrain.models.equinox\(model"):
        models.equinox(net)
    with pytest.raises(TypeError, match="a state belongs to a module"):
        models.equinox(EquinoxNet, state)


def test_a_module_of_equinox_that_returns_no_state_is_refused():
    class Forgetful(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(x, state)[0]

    model = models.equinox(Forgetful)
    with pytest.raises(TypeError, match=r"Forgetful has a state.*return \(outputs, state\)"):
        model.apply(*model.init(KEY), X, train=True)


# What is no model.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: models.nnx(LinenNet()),
            r"got a LinenNet; it is of flax.linen: use ftrain.models.linen\(model, ex",
        ),
        (lambda: models.nnx(3), r"needs a module of flax.nnx.*got a int, 3; for functions of your"),
        (lambda: models.nnx(LinenNet), r"the class LinenNet; it is of flax.linen: use"),
        (lambda: models.nnx(lambda rngs: "x").params, "a function that returns a module of flax"),
        (lambda: models.linen(NnxNet(nnx.Rngs(0)), X), r"use ftrain.models.nnx\(model\)"),
        (lambda: models.linen(LinenNet, X), "the class LinenNet; make one: call the class"),
        (lambda: models.linen(LinenNet()), r"an example of each input of the model \(x\)"),
        (lambda: models.equinox(hk.transform(haiku_net)), r"use ftrain.models.haiku\(function, ex"),
        (lambda: models.equinox(lambda key: 3).params, "needs a module of equinox, or one and"),
        (lambda: models.haiku(NnxNet(nnx.Rngs(0)), X), r"use ftrain.models.nnx\(model\)"),
        (lambda: models.haiku(hk.Linear, X), "the class Linear; make one"),
        (lambda: models.haiku(haiku_net), r"each input of the model \(x\).*got 0"),
        (lambda: models.Model(3, 4), "init of a Model must be a function, got 3"),
    ],
)
def test_what_is_no_model_is_refused_with_a_way_out(call, message):
    with pytest.raises(TypeError, match=message):
        call()


RAW = {
    "nnx": (lambda: NnxNet(nnx.Rngs(0)), r"model of flax.nnx \(NnxNet\).*pass ftrain.models.nnx"),
    "linen": (LinenNet, r"model of flax.linen \(LinenNet\).*ftrain.models.linen\(model, example"),
    "equinox": (lambda: EquinoxNet(KEY), r"model of equinox \(EquinoxNet\).*ftrain.models.equinox"),
    "haiku": (
        lambda: hk.transform_with_state(haiku_net),
        r"model of haiku \(TransformedWithState\).*ftrain.models.haiku\(function, example",
    ),
    "state": (
        lambda: train_state.TrainState.create(
            apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)
        ),
        r"flax.training.train_state.TrainState.*pass its `params`, its `tx` as the optimizer",
    ),
    "variables": (
        lambda: LinenNet().init(KEY, X, train=False),
        r"the collections params, .* of flax, .*pass variables\[.params.\], and the others",
    ),
}


@pytest.mark.parametrize(("make", "message"), RAW.values(), ids=RAW)
def test_an_object_of_a_library_in_the_place_of_parameters_is_refused(make, message, pipeline):
    def loss_fn(params, batch, rng):
        return 0.0

    with pytest.raises(TypeError, match=message):
        ftrain.train(loss_fn, make(), pipeline, optimizer=optax.sgd(0.1), steps=1)
    with pytest.raises(TypeError, match=message):
        ftrain.TrainState.create(make(), optax.sgd(0.1))


@pytest.mark.parametrize("name", ["nnx", "linen", "equinox", "haiku", "state"])
def test_an_object_of_a_library_in_other_places_is_refused(name, pipeline):
    raw = RAW[name][0]()
    step = ftrain.make_step(lambda params, batch, rng: 0.0, optax.sgd(0.1))
    way_out = "make ftrain's" if name == "state" else f"ftrain.models.{name}"
    with pytest.raises(TypeError, match=way_out), ftrain.Run(step, raw, pipeline):
        pass
    with pytest.raises(TypeError, match=r"init of a Task is a .*expected a function of a key"):
        ftrain.tasks.Task(raw, step, pipeline.source)


def test_an_optimizer_of_nnx_is_refused(pipeline):
    optimizer = nnx.Optimizer(NnxNet(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"optimizer is a flax.nnx.Optimizer; pass its `tx`"):
        ftrain.train(lambda *_: 0.0, {"w": jnp.ones(3)}, pipeline, optimizer=optimizer, steps=1)


def test_a_flag_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'trains' is no argument of the model; there are x, tra"):
        models.linen(LinenNet(), X, train_argument="trains")


def test_functions_of_a_model_that_return_something_else_are_refused():
    with pytest.raises(TypeError, match=r"must return \(params, model_state\).*got a dict"):
        models.Model(lambda rng: {}, lambda *_, **__: None).init(KEY)
    with pytest.raises(TypeError, match=r"must return \(outputs, model_state\), got a tuple of 3"):
        models.Model(lambda rng: ({}, None), lambda *_, **__: (1, 2, 3)).apply({}, None)


@pytest.mark.parametrize("name", ["nnx", "equinox"])
def test_variables_of_another_model_are_refused(name):
    model = MAKE[name]()
    with pytest.raises(ValueError, match=r"params has no leaf \w+/.*pass what its init returned"):
        model.apply({"w": jnp.ones(3)}, model.model_state, X)
    with pytest.raises(ValueError, match=r"model_state\S* has no leaf "):
        model.apply(model.params, None, X)


@pytest.mark.parametrize(
    ("name", "library"),
    [("nnx", "flax"), ("linen", "flax"), ("equinox", "equinox"), ("haiku", "haiku")],
)
def test_a_library_that_is_not_installed_names_its_extra(name, library, monkeypatch):
    for loaded in [each for each in sys.modules if each.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'ftrain\[{library}\]'"):
        getattr(models, name)(print)


def test_no_library_is_imported_before_it_is_used():
    code = (
        "import sys, ftrain; ftrain.models.Model; ftrain.train; "
        "sys.exit(any(name in sys.modules for name in ('flax', 'equinox', 'haiku')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
