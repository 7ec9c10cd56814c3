"""Nested tables: optimizers in optimizers, and arguments that are dataclasses, enums and so on."""

import tomllib
from pathlib import Path

import jax
import jsonschema
import optax
import pytest
import tomli_w
import typed_task
from typed_task import Activation, Encoder, Head, Level, Span

from ftrain.config import ConfigError, build, json_schema, load, plan
from ftrain.gradients.guard import GuardState

CONFIG = """
task = "regression:regression"
steps = 20

[data]
batch_size = 8

[optimizer]
name = "adam"
learning_rate = 0.1
"""
ADAM = "{name='adam', learning_rate=0.25}"


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def typed(config) -> Path:
    config.write_text(CONFIG.replace("regression:regression", "typed_task:typed"))
    return config


def message_of(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        build(plan(load(path, overrides)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def again(path, planned) -> dict:
    """What a resolved config resolves to."""
    copy = path.with_name("again.toml")
    copy.write_text(tomli_w.dumps(planned.resolved()))
    return plan(load(copy)).resolved()


def built(path, *overrides) -> dict:
    """The arguments that the task was called with; its resolved config is the same again."""
    planned = plan(load(path, overrides))
    assert again(path, planned) == planned.resolved()
    build(planned)
    return dict(typed_task.received)


NESTED = [
    f"{{name='optax.apply_if_finite', inner={ADAM}, max_consecutive_errors=5}}",
    f"{{name='optax.MultiSteps', opt={ADAM}, every_k_schedule=2}}",
    f"{{name='optax.masked', inner={ADAM}, mask={{w=true, b=false}}}}",
    f"{{name='optax.flatten', "
    f"inner={{name='optax.apply_if_finite', inner={ADAM}, max_consecutive_errors=5}}}}",
    f"{{name='guard', optimizer={ADAM}, spike=5.0}}",
    f"{{name='loss_scaling', optimizer={{name='guard', optimizer={ADAM}}}}}",
    f"{{name='optax.chain', args=[{{name='optax.clip_by_global_norm', max_norm=1.0}}, {ADAM}]}}",
    f"{{name='optax.named_chain', "
    f"args=[['clip', {{name='optax.clip', max_delta=1.0}}], ['adam', {ADAM}]]}}",
]


@pytest.mark.standard_promotion  # optax.MultiSteps
@pytest.mark.parametrize("table", NESTED, ids=lambda table: table[7:28])
def test_an_optimizer_inside_of_another_is_built(config, table):
    planned = plan(load(config, [f"optimizer={table}"]))
    assert again(config, planned) == planned.resolved()
    job = build(planned)
    assert isinstance(job.optimizer, optax.GradientTransformation)
    state, metrics = jax.jit(job.step)(job.initial_state(), job.pipeline.batch(0))
    assert int(state.step) == 1
    assert float(metrics["learning_rate"]) == 0.25


def test_lookahead_is_built_around_another_optimizer(config):
    table = f"{{name='optax.lookahead', fast_optimizer={ADAM}, sync_period=5, slow_step_size=0.5}}"
    job = build(plan(load(config, [f"optimizer={table}"])))
    params = optax.LookaheadParams.init_synced(job.task.init(jax.random.key(0)))
    assert isinstance(job.optimizer.init(params), optax.LookaheadState)


def test_plain_optax_inside_of_a_wrapper_shows_its_rate_unless_it_has_another_clock(config):
    rate = "{name='cosine_decay', learning_rate=0.5, decay_steps=10}"
    inner = f"{{name='optax.adam', learning_rate={rate}}}"
    wrapped = f"optimizer={{name='optax.apply_if_finite', inner={inner}, max_consecutive_errors=5}}"
    assert float(build(plan(load(config, [wrapped]))).learning_rate(0)) == 0.5
    late = f"optimizer={{name='optax.MultiSteps', opt={inner}, every_k_schedule=2}}"
    assert build(plan(load(config, [late]))).learning_rate is None


def test_groups_of_parameters_have_an_optimizer_each(config):
    sgd = "{name='optax.sgd', learning_rate=0.5}"
    transforms = f"{{a={ADAM}, b={sgd}}}"
    table = f"{{name='optax.partition', transforms={transforms}, param_labels={{w='a', b='b'}}}}"
    job = build(plan(load(config, [f"optimizer={table}"])))
    assert set(job.abstract_state().opt_state.inner_states) == {"a", "b"}
    assert job.learning_rate is None  # there are two


def test_the_guard_is_an_optimizer_by_name(config):
    job = build(plan(load(config, [f"optimizer={{name='guard', optimizer={ADAM}, spike=5.0}}"])))
    assert isinstance(job.abstract_state().opt_state, GuardState)


def test_overrides_reach_into_inner_tables_and_arrays(config):
    config.write_text(
        CONFIG.partition("[optimizer]")[0]
        + "[optimizer]\nname = 'optax.chain'\n"
        + "[[optimizer.args]]\nname = 'optax.clip'\nmax_delta = 1.0\n"
        + "[[optimizer.args]]\nname = 'optax.flatten'\n"
        + "inner = {name = 'adam', learning_rate = 0.1}\n"
    )
    planned = plan(
        load(config, ["optimizer.args.1.inner.learning_rate=0.5", "optimizer.args.0.max_delta=2.0"])
    )
    assert planned.resolved()["optimizer"]["args"][0]["max_delta"] == 2.0
    assert planned.resolved()["optimizer"]["args"][1]["inner"]["learning_rate"] == 0.5
    assert "optimizer.args has 2 entries, 0 to 1" in message_of(
        config, "optimizer.args.2.max_delta=2.0"
    )


FINITE = "optimizer={{name='optax.apply_if_finite', max_consecutive_errors=5, inner={}}}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [FINITE.format("{name='adam', learning_rte=0.1}")],
            "command line: optimizer.inner.learning_rte: unknown key; did you mean learning_rate?",
        ),
        (
            [FINITE.format("{name='momentum'}")],
            "optimizer.inner.learning_rate: is missing, and it has no default",
        ),
        (
            [FINITE.format("{name='adm', learning_rate=0.1}")],
            "optimizer.inner.name: there is no 'adm' in ftrain.opt",
        ),
        (
            [FINITE.format("{learning_rate=0.1}")],
            "optimizer.inner.name: is missing; name one of adadelta",
        ),
        (
            [FINITE.format("'adam'")],
            "optimizer.inner: must be an optimizer, got 'adam'; write a table that calls",
        ),
        (
            [FINITE.format("3")],
            "optimizer.inner: must be an optimizer, got 3; write a table that calls a function",
        ),
        (
            [FINITE.format("{name='os.getcwd'}")],
            "[optimizer.inner] getcwd must return an optax.GradientTransformation",
        ),
        (
            [FINITE.format("{name='adam', learning_rate='x'}")],
            "optimizer.inner.learning_rate: must be a valid number",
        ),
        (
            [FINITE.format("{name='adam', learning_rate=0.1, slot_dtype='x'}")],
            "[optimizer.inner] slot_dtype must be",
        ),
        (
            [
                FINITE.format(
                    "{name='adam', "
                    "learning_rate={name='cosine_decay', learning_rate=1.0, decay_step=3}}"
                )
            ],
            "optimizer.inner.learning_rate.decay_step: unknown key; did you mean decay_steps?",
        ),
        (
            ["optimizer={name='optax.apply_if_finite'}"],
            "optimizer.inner: is missing, and it has no default; it is an op",
        ),
        (
            ["optimizer={name='optax.chain', args=[3]}"],
            "optimizer.args.0: must be an optimizer, got 3",
        ),
        (
            ["optimizer={name='optax.chain', args=3}"],
            "optimizer.args: must be a valid list, got 3",
        ),
        (
            ["optimizer={name='optax.chain', arg=[]}"],
            "optimizer.arg: unknown key; did you mean args?",
        ),
        (
            ["optimizer={name='optax.named_chain', args=[['x']]}"],
            "optimizer.args.0: must have 2 entries, got ['x']",
        ),
        (["optimizer={name='optax.tree.map'}"], "optimizer"),
        (
            ["optimizer={name='math.pi'}"],
            "optimizer.name: 'math.pi' is not a function or class, it is 3.14",
        ),
        (
            ["optimizer={name=''}"],
            "optimizer.name: must be the name of a function, got ''; name one of",
        ),
        (
            ["optimizer={name='optax.'}"],
            "optimizer.name: 'optax.' is missing: optax has no function",
        ),
        (
            ["checkpoint.listeners=['typed_task:Demanding']"],
            "checkpoint.listeners.place: is missing, and it has no def",
        ),
        (['run.directory="a\\u0000b"'], "cannot be a path: it has a null character"),
        (["task=typed_task:raising"], "[model] fails: KeyError: 'of the task'"),
    ],
)
def test_a_mistake_in_an_inner_table_names_its_key(config, overrides, expected):
    assert expected in message_of(config, *overrides)


def test_a_module_that_cannot_be_imported_is_two_lines(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_syntax.py").write_text("def task(:\n")
    (tmp_path / "broken_exit.py").write_text("raise SystemExit(3)\n")
    assert "'broken_syntax:task' cannot be imported: SyntaxError" in message_of(
        config, "task=broken_syntax:task"
    )
    assert "'broken_exit:task' cannot be imported: SystemExit: 3" in message_of(
        config, "task=broken_exit:task"
    )


def test_defaults_are_passed_as_they_are_and_written_out(typed):
    resolved = plan(load(typed)).resolved()["model"]
    assert resolved["encoder"] == {
        "depth": 2,
        "head": {"width": 16, "dropout": 0.0, "activation": "RELU", "sizes": [4, 2]},
    }
    assert resolved["activation"] == "GELU"
    assert resolved["level"] == "LOW"
    assert resolved["limit"] == float("inf")
    received = built(typed)
    assert received["encoder"] == Encoder(depth=2)
    assert received["level"] is Level.LOW


def test_tables_become_dataclasses(typed):
    received = built(
        typed,
        "model.head={width=3, activation='gelu'}",
        "model.heads=[{}, {width=5}]",
        "model.encoder={depth=7, parent={depth=1}}",
        "model.span={start=2}",
        "model.options={rate=0.5}",
    )
    assert received["head"] == Head(3, activation=Activation.GELU)
    assert received["heads"] == [Head(), Head(5)]
    assert received["encoder"] == Encoder(depth=7, parent=Encoder(depth=1))
    assert received["span"] == Span(2)
    assert received["options"] == {"rate": 0.5}


def test_a_key_of_a_table_changes_one_field_of_the_default(typed):
    received = built(typed, "model.encoder.head.dropout=0.5", "model.span.stop=3")
    assert received["span"] == Span(1, 3)
    assert received["encoder"] == Encoder(depth=2, head=Head(width=16, dropout=0.5))


def test_other_types_arrive_as_their_annotations_say(typed):
    received = built(
        typed,
        "model.activation=relu",
        "model.level=2",
        "model.mode=slow",
        "model.weights={a=1, b=2.5}",
        "model.scales={10=0.5}",
        "model.sizes=[3]",
        "model.pair=[3, 'b']",
        "model.where=/tmp",
        "model.norm='jax.numpy.tanh'",
        "model.opaque={name='typed_task:Opaque', size=4}",
        "model.array={name='numpy.asarray', a=[1, 2]}",
        "model.unresolved=3",
    )
    assert received["activation"] is Activation.RELU
    assert received["level"] is Level.HIGH
    assert received["mode"] == "slow"
    assert received["weights"] == {"a": 1.0, "b": 2.5}
    assert received["scales"] == {10: 0.5}
    assert received["sizes"] == (3,)
    assert received["pair"] == (3, "b")
    assert received["where"] == Path("/tmp")
    assert received["norm"] is jax.numpy.tanh
    assert received["opaque"].size == 4
    assert received["array"].tolist() == [1, 2]
    assert received["unresolved"] == 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.head={widht=3}", "model.head.widht: unknown key; did you mean width?"),
        ("model.head={width='x'}", "model.head.width: must be a valid integer, got 'x'"),
        ("model.head={width=0}", "[model.head] width must be >= 1, got 0"),
        ("model.head=3", "model.head: must be a table, got 3"),
        ("model.head=[]", "model.head: must be a table, got []"),
        ("model.head={sizes=[1, 'x']}", "model.head.sizes.1: must be a valid integer, got 'x'"),
        ("model.heads={}", "model.heads: must be a valid list, got {}"),
        (
            "model.heads=[{}, {width=true}]",
            "model.heads.1.width: must be a valid integer, got True",
        ),
        ("model.heads=[{}, 3]", "model.heads.1: must be a table, got 3"),
        (
            "model.encoder.parent={head={}}",
            "model.encoder.parent.depth: is missing, and it has no default",
        ),
        ("model.encoder.parent.parent={depth=1, dpth=2}", "model.encoder.parent.depth: is missing"),
        (
            "model.encoder.head.widht=3",
            "model.encoder.head.widht: unknown key; did you mean width?",
        ),
        ("model.encoder.head.width=0", "[model.encoder.head] width must be >= 1, got 0"),
        (
            "model.activation=rlu",
            "model.activation: must be one of RELU ('relu'), GELU ('gelu'), got 'rlu'",
        ),
        ("model.level=3", "model.level: must be one of LOW (1), HIGH (2), got 3"),
        ("model.level=true", "model.level: must be one of LOW (1), HIGH (2), got True"),
        ("model.mode=medium", "model.mode: must be 'fast' or 'slow', got 'medium'"),
        ("model.weights={a='x'}", "model.weights.a: must be a valid number, got 'x'"),
        ("model.weights=[1.0]", "model.weights: must be a table, got [1.0]"),
        ("model.scales={a=0.5}", "model.scales.a: its keys must be numbers, got 'a'"),
        ("model.sizes=3", "model.sizes: must be a valid list, got 3"),
        ("model.pair=[1]", "model.pair: must have 2 entries, got [1]"),
        ("model.pair=['a', 1]", "model.pair.0: must be a valid integer, got 'a'"),
        ("model.where=3", "model.where: must be a path, a string, got 3"),
        ("model.limit=-inf", "model.limit: must be a finite number, got -inf"),
        ("model.span={stp=3}", "model.span.stp: unknown key; did you mean stop?"),
        ("model.options={note='x'}", "model.options.rate: is missing"),
        ("model.norm=3", 'model.norm: must name a function, "package.module:name", got 3'),
        (
            "model.opaque=3",
            "model.opaque: must be a typed_task.Opaque, which TOML cannot express, got 3; "
            "write a table",
        ),
        (
            "model.opaque={size=3}",
            "model.opaque: must be a typed_task.Opaque, which TOML cannot express, got {'size",
        ),
        (
            "model.opaque={name='os.getcwd'}",
            "[model.opaque] getcwd must return an instance of typed_task.Opaque",
        ),
        (
            "model.array=[1, 2]",
            "model.array: must be a numpy.ndarray, which TOML cannot express, got [1, 2]",
        ),
    ],
)
def test_a_value_of_another_type_names_its_key(typed, override, expected):
    assert expected in message_of(typed, override)


def test_an_argument_that_only_a_call_can_make_is_asked_for(config):
    expected = (
        "model.opaque: is missing, and it has no default; "
        "it is a typed_task.Opaque, which TOML cannot express"
    )
    assert expected in message_of(config, "task=typed_task:needs_opaque")


def test_tables_too_deep_are_refused(config):
    table = ADAM
    for _ in range(60):
        table = f"{{name='optax.flatten', inner={table}}}"
    assert "is nested in more than 32 tables" in message_of(config, f"optimizer={table}")


@pytest.fixture(scope="module")
def validator():
    schema = json_schema(task="typed_task:typed")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def typed_values(*overrides) -> dict:
    values = tomllib.loads(CONFIG.replace("regression:regression", "typed_task:typed"))
    for override in overrides:
        values |= tomllib.loads(override)
    return values


@pytest.mark.parametrize(
    "override",
    [
        "optimizer={name='guard', optimizer={name='adam', learning_rate=0.1}}",
        "optimizer={name='guard', optimizer={name='optax.anything', x=3}}",
        "model={head={width=3, activation='gelu'}, heads=[{}, {width=5}], level=2}",
        "model={encoder={depth=7, parent={depth=1}}, pair=[1, 'x'], weights={a=1.0}, where='x'}",
        "model={norm='jax.numpy.tanh', opaque={name='a:b', x=3}}",
    ],
)
def test_the_schema_accepts_what_can_be_built(validator, override):
    validator.validate(typed_values(override))


@pytest.mark.parametrize(
    "override",
    [
        "optimizer={name='guard', optimizer={name='adam', learning_rte=0.1}}",
        "optimizer={name='guard', optimizer=3}",
        "optimizer={name='guard'}",
        "model={head={widht=3}}",
        "model={head={activation='rlu'}}",
        "model={heads={}}",
        "model={encoder={parent={depth='x'}}}",
        "model={weights={a='x'}}",
        "model={pair=[1]}",
        "model={opaque=3}",
        "model={unknown=3}",
    ],
)
def test_the_schema_finds_mistakes(validator, override):
    assert not validator.is_valid(typed_values(override))


def test_the_schema_knows_tasks_of_the_package(validator):
    digits = typed_values() | {"task": "digits", "model": {"hidden": 3}}
    validator.validate(digits)
    assert not validator.is_valid(digits | {"model": {"hiden": 3}})
    jsonschema.Draft202012Validator(json_schema()).validate(typed_values("model={unknown=3}"))
