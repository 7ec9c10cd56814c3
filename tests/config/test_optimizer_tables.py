"""Parameter groups, chains and scheduled numbers in configs."""

import re
import tomllib
from pathlib import Path

import jax
import jsonschema
import numpy as np
import optax
import pytest
import tomli_w

from ftrain import TrainState, compile_step, make_step, optimizers, schedules
from ftrain.cli.check import check
from ftrain.config import ConfigError, build, json_schema, load, plan
from ftrain.optimizers import Group
from ftrain.run import Run

SHIPPED = Path(__file__).parents[2] / "configs" / "digits_groups.toml"
CONFIG = """
task = "regression:regression"
steps = 6

[data]
batch_size = 8

[optimizer]
name = "adam"
learning_rate = 0.1
weight_decay = 0.5

[[optimizer.groups]]
match = "b"
learning_rate_scale = 2.0
weight_decay = 0.0
"""
HEAD = CONFIG.partition("[optimizer]")[0]


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def planned(path, *overrides):
    """The plan; its resolved config is valid, and the same again."""
    made = plan(load(path, overrides))
    copy = path.with_name("again.toml")
    copy.write_text(tomli_w.dumps(made.resolved()))
    assert plan(load(copy)).resolved() == made.resolved()
    jsonschema.validate(tomllib.loads(copy.read_text()), json_schema("regression:regression"))
    return made


def train(job, steps=4):
    state = job.initial_state()
    step = jax.jit(job.step)
    for number in range(steps):
        state, metrics = step(state, job.pipeline.batch(number))
    return state, metrics


def train_with(job, optimizer, steps=4, **options):
    """The same job with an optimizer made in Python."""
    start = job.initial_state()
    state = TrainState.create(start.params, optimizer, seed=start.rng)
    step = jax.jit(make_step(job.task.loss_fn, optimizer, **options))
    for number in range(steps):
        state, metrics = step(state, job.pipeline.batch(number))
    return state, metrics


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_groups_are_those_of_python(config):
    job = build(planned(config))
    state, metrics = train(job)
    expected, _ = train_with(
        job,
        optimizers.groups(
            optimizers.adam(0.1, weight_decay=0.5),
            [Group("b", learning_rate_scale=2.0, weight_decay=0.0)],
        ),
    )
    assert_equal(state.params, expected.params)
    assert float(metrics["learning_rate/b"]) == pytest.approx(0.2)
    assert job.learning_rate == 0.1


def test_a_group_may_have_another_optimizer_and_another_may_be_frozen(config):
    config.write_text(
        HEAD
        + """
[optimizer]
name = "adam"
learning_rate = 0.1

[[optimizer.groups]]
match = "w"
freeze = true

[[optimizer.groups]]
match = "b"
name = "offset"
optimizer = { name = "momentum", learning_rate = 0.05, momentum = 0.9 }
"""
    )
    job = build(planned(config))
    state, metrics = train(job)
    assert_equal(state.params["w"], job.initial_state().params["w"])
    assert float(metrics["learning_rate/offset"]) == pytest.approx(0.05)
    assert set(state.opt_state.own) == {"offset"}
    assert optimizers.slot_names(state.opt_state) == ["m", "momentum", "v"]


def test_overrides_reach_into_groups(config):
    job = build(planned(config, "optimizer.groups.0.learning_rate_scale=3.0"))
    assert float(train(job, 1)[1]["learning_rate/b"]) == pytest.approx(0.3)
    assert build(planned(config, "optimizer.groups=[]")).groups() == []


CHAIN = """
[[optimizer.chain]]
name = "clip_by_norm"
clip_norm = { name = "exponential_decay", learning_rate = 1.0, decay_steps = 4, decay_rate = 0.5 }

[[optimizer.chain]]
name = "optax.add_decayed_weights"
weight_decay = 0.1

[[optimizer.chain]]
name = "momentum"
momentum = { name = "join", boundaries = [2], schedules = [
    0.5,
    { name = "polynomial_decay", learning_rate = 0.8, decay_steps = 2, end_learning_rate = 0.9 },
] }
learning_rate = { name = "cosine_decay", learning_rate = 0.1, decay_steps = 6 }
"""


def test_a_chain_is_that_of_python(config):
    from ftrain.gradients import as_transform, clip_by_norm

    config.write_text(HEAD + CHAIN)
    job = build(planned(config))
    state, _ = train(job)
    momentum = schedules.join([0.5, schedules.polynomial_decay(0.8, 2, 0.9)], [2])
    chain = optax.chain(
        as_transform(clip_by_norm, clip_norm=schedules.exponential_decay(1.0, 4, 0.5)),
        optax.add_decayed_weights(0.1),
        optimizers.momentum(schedules.cosine_decay(0.1, 6), momentum),
    )
    assert_equal(state.params, train_with(job, chain)[0].params)
    assert float(job.learning_rate(3)) == pytest.approx(0.05)


@pytest.mark.standard_promotion  # optax
def test_numbers_of_optax_may_be_scheduled(config):
    rate = '{name="cosine_decay", learning_rate=0.1, decay_steps=6}'
    fall = '{name="polynomial_decay", learning_rate=0.9, decay_steps=4, end_learning_rate=0.1}'
    sgd = f'{{name="optax.sgd", learning_rate={rate}, momentum={fall}}}'
    clip = f'{{name="optax.clip_by_global_norm", max_norm={fall}}}'
    job = build(planned(config, f"optimizer={{chain=[{clip}, {sgd}]}}"))
    state, metrics = train(job)
    falling = schedules.polynomial_decay(0.9, 4, 0.1)
    expected, _ = train_with(
        job,
        optax.chain(
            optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=falling),
            optax.inject_hyperparams(optax.sgd)(
                learning_rate=schedules.cosine_decay(0.1, 6), momentum=falling
            ),
        ),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, expected.params
    )
    assert float(metrics["learning_rate"]) == pytest.approx(float(job.learning_rate(3)))
    constant, _ = train(
        build(
            planned(
                config, f"optimizer={{chain=[{clip}, {sgd}]}}", "optimizer.chain.1.momentum=0.9"
            )
        )
    )
    assert (np.asarray(constant.params["w"]) != np.asarray(state.params["w"])).all()


def test_a_chain_replaces_the_optimizer_of_the_extended_config(config):
    other = config.with_name("other.toml")
    other.write_text('extends = "job.toml"\n' + CHAIN)
    resolved = planned(other).resolved()["optimizer"]
    assert resolved.keys() == {"chain"}
    third = config.with_name("third.toml")
    third.write_text('extends = "other.toml"\n[optimizer]\nname = "adam"\n')
    assert "chain" not in planned(third).resolved()["optimizer"]


def test_a_chain_may_have_groups_and_a_group_a_chain(config):
    groups = """
[[optimizer.groups]]
match = "b"

[[optimizer.groups.optimizer.chain]]
name = "clip_by_value"
clip_value_min = -1.0
clip_value_max = 1.0

[[optimizer.groups.optimizer.chain]]
name = "adam"
learning_rate = 0.2
"""
    config.write_text(HEAD + CHAIN + groups)
    job = build(planned(config))
    state, metrics = train(job)
    assert float(metrics["learning_rate/b"]) == pytest.approx(0.2)
    assert len(state.opt_state.base) == 3
    assert float(job.learning_rate(0)) == pytest.approx(0.1)


def test_groups_are_for_an_optimizer_at_any_depth(config):
    config.write_text(
        HEAD
        + """
[optimizer]
name = "guard"
optimizer = { name = "adam", learning_rate = 0.1, groups = [{ match = "w", freeze = true }] }
"""
    )
    job = build(planned(config))
    state, metrics = train(job)
    assert_equal(state.params["w"], job.initial_state().params["w"])
    assert float(metrics["update_skipped"]) == 0
    assert [group.match for group in job.groups()] == ["w"]


@pytest.mark.parametrize("wrapper", ["guard.spike=100.0", "loss_scaling.scale=8.0"])
def test_tables_around_the_optimizer_keep_groups(config, wrapper):
    state, metrics = train(build(planned(config, wrapper)))
    assert float(metrics["learning_rate/b"]) == pytest.approx(0.2)
    assert float(metrics["update_skipped"]) == 0
    assert int(state.step) == 4


def test_numbers_of_the_step_may_be_scheduled(config):
    clip = 'step.clip_global_norm={name="polynomial_decay", learning_rate=1.0, decay_steps=4}'
    decay = 'step.averages={name="join", schedules=[0.0, 0.9], boundaries=[2]}'
    job = build(planned(config, clip, decay))
    state, _ = train(job)
    optimizer = optimizers.groups(
        optimizers.adam(0.1, weight_decay=0.5),
        [Group("b", learning_rate_scale=2.0, weight_decay=0.0)],
    )
    limit = schedules.polynomial_decay(1.0, 4)
    expected, _ = train_with(job, optimizer, clip_global_norm=limit)
    assert_equal(state.params, expected.params)
    assert (np.asarray(state.averages["w"]) != np.asarray(state.params["w"])).all()


def test_a_resumed_run_repeats_every_bit(config):
    numbers = [
        'step.clip_global_norm={name="polynomial_decay", learning_rate=1.0, decay_steps=4}',
        'optimizer.beta1={name="polynomial_decay", learning_rate=0.9, decay_steps=6}',
        'optimizer.groups=[{match="b", learning_rate={name="inverse_sqrt", learning_rate=0.1, '
        "warmup_steps=3}}]",
    ]
    states = {}
    for name, lengths in {"whole": [6], "resumed": [3, 6]}.items():
        for steps in lengths:
            job = build(
                planned(config, *numbers, "mesh.data=1", f"run.directory={name}", f"steps={steps}")
            )
            with Run(
                job.step,
                job.initial(),
                job.pipeline,
                steps=steps,
                hooks=job.hooks(),
                directory=job.directory,
                **job.loop_options,
            ) as run:
                while not run.should_stop():
                    run.advance()
                states[name] = jax.device_get((run.state.params, run.state.opt_state))
    assert_equal(states["whole"], states["resumed"])


def test_slots_of_groups_are_sharded_by_rules(config):
    split = ["mesh.data=1", "mesh.fsdp=3", "data.batch_size=12", 'step.parallel="jit"']
    rule = 'sharding.rules=[{leaf="w", axes=["fsdp"]}]'
    job = build(planned(config, *split, rule))
    step = compile_step(job.step, job.mesh, shardings=job.shardings())
    state = job.initial_state()
    for number in range(3):
        state, _ = step(state, job.pipeline.batch(number))
    slot = optimizers.get_slot(state.opt_state, "w", "m")
    assert slot.sharding.is_equivalent_to(state.params["w"].sharding, 1)
    assert not slot.sharding.is_fully_replicated
    single, _ = train(build(planned(config, "mesh.data=1", "data.batch_size=12")), 3)
    np.testing.assert_allclose(state.params["w"], single.params["w"], rtol=1e-5)


def test_check_shows_the_groups(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(SHIPPED, ["model.channels=2", "model.hidden=4"])
    shown = capsys.readouterr().out
    assert re.search(r"parameters +\d+ in 8 leaves, 20 of them frozen", shown)
    assert re.search(r"conv1 +conv1/\.\* +frozen +2 +20 *\n", shown)
    changes = "learning_rate_scale 2.0, weight_decay 0.0"
    assert re.search(rf"conv2_dense_bias +\(conv2\|dense\)/bias +{changes} +2 +8 *\n", shown)
    assert re.search(r"scores +scores/\.\* +own optimizer +2 +50 *\n", shown)
    assert re.search(r"\(all others\) +2 +\d+ *\n", shown)
    assert "learning_rate/conv2_dense_bias, learning_rate/scores" in shown


def test_the_shipped_config_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["model.channels=2", "model.hidden=8", "data.batch_size=16", "steps=3"]
    job = build(plan(load(SHIPPED, small)))
    state, metrics = train(job, 3)
    start = job.initial_state().params
    assert_equal(state.params["conv1"], start["conv1"])
    for layer in ("conv2", "dense", "scores"):
        assert (np.asarray(state.params[layer]["kernel"]) != start[layer]["kernel"]).any()
    assert np.isfinite(metrics["loss"])


def message_of(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        build(plan(load(path, overrides))).trace()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def group(text):
    return f"optimizer.groups=[{text}]"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            group('{match="encoder/.*", freeze=true}'),
            "optimizer.groups.0.match: pattern 'encoder/.*' matches no parameter; "
            "it must match a whole name, such as b, w",
        ),
        (
            group('{match="w", freeze=true}, {match=".*", weight_decay=0.1}'),
            "optimizer.groups.1.match: parameter w matches two groups, 'w' and '.*'",
        ),
        (group('{match="w[", freeze=true}'), "[optimizer.groups.0] match must be a regular expr"),
        (
            group('{match="w", freeze=true, learning_rate=0.1}'),
            "[optimizer.groups.0] group 'w' has freeze and learning_rate",
        ),
        (group('{match="w"}'), "[optimizer.groups.0] group 'w' changes nothing"),
        (
            group('{match="w", learning_rte=0.1}'),
            "optimizer.groups.0.learning_rte: unknown key; did you mean learning_rate?",
        ),
        (group('{match="w", freeze=1}'), "optimizer.groups.0.freeze: must be a valid boolean"),
        (group("{freeze=true}"), "optimizer.groups.0.match: is missing, and it has no default"),
        (
            group('{match="w", learning_rate={name="cosine_decy"}}'),
            "optimizer.groups.0.learning_rate.name: there is no 'cosine_decy'",
        ),
        (
            group('{match="w", optimizer={name="adm"}}'),
            "optimizer.groups.0.optimizer.name: there is no 'adm' in ftrain.optimizers; did you",
        ),
        ("optimizer.groups=3", "optimizer.groups: must be tables, [[optimizer.groups]], got 3"),
        (
            'optimizer.groups=["w"]',
            "optimizer.groups: must be tables, [[optimizer.groups]], got ['w']",
        ),
        (
            'optimizer={name="optax.adamw", learning_rate=0.1, '
            'groups=[{match="w", learning_rate=0.2}]}',
            "optimizer.groups.0.match: the optimizer is not one of ftrain's",
        ),
        (
            'optimizer={name="ftrl", learning_rate=0.1, groups=[{match="w", weight_decay=0.2}]}',
            "optimizer.groups.0.match: weight_decay: this optimizer has none",
        ),
        ("optimizer={chain=[]}", "optimizer.chain: must have at least one entry"),
        ("optimizer={chain=3}", "optimizer.chain: must be tables, [[optimizer.chain]], got 3"),
        (
            'optimizer={learning_rate=0.1, chain=[{name="adam"}]}',
            "optimizer.learning_rate: unknown key beside chain",
        ),
        (
            'optimizer.chain=[{name="adam"}]',
            "optimizer.chain: an optimizer has a name or a chain, this one is named 'adam'",
        ),
        (
            'optimizer={chain=[{name="clip_by_nrm", clip_norm=1.0}, {name="adam"}]}',
            "optimizer.chain.0.name: there is no 'clip_by_nrm' in ftrain.optimizers; did you mean",
        ),
        (
            'optimizer={chain=[{name="clip_by_norm"}, {name="adam"}]}',
            "optimizer.chain.0.clip_norm: is missing",
        ),
        (
            'optimizer={chain=[{name="clip_by_norm", clip_norm=-1.0}, {name="adam"}]}',
            "clip_norm must be >= 0",
        ),
        (
            'optimizer.learning_rate={name="join", schedules=[0.1], boundaries=[3]}',
            "[optimizer.learning_rate] schedules must have one more entry than boundaries",
        ),
        (
            'optimizer.learning_rate={name="join", boundaries=[3], '
            'schedules=[0.1, {name="cosine_dcay"}]}',
            "optimizer.learning_rate.schedules.1.name: there is no 'cosine_dcay'",
        ),
        (
            'optimizer={name="optax.sgd", learning_rate=0.1, momentum={name="cosine_dcay"}}',
            "optimizer.momentum.name: there is no 'cosine_dcay' in ftrain.schedules; did you mean",
        ),
        ("step.clip_global_norm=-1.0", "[step] clip_global_norm must be > 0, got -1.0"),
        ("optimizer.name='groups'", "optimizer.name: there is no 'groups'"),
    ],
)
def test_mistakes_name_the_key(config, override, expected):
    assert expected in message_of(config, override)
    assert not (config.parent / "runs").exists()


@pytest.fixture(scope="module")
def validator():
    return jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize(
    ("optimizer", "is_valid"),
    [
        ({"name": "adam", "groups": [{"match": "a", "freeze": True}]}, True),
        ({"name": "adam", "groups": [{"match": "a", "optimizer": {"name": "adam"}}]}, True),
        ({"name": "optax.lion", "groups": [{"match": "a", "freeze": True}]}, True),
        ({"chain": [{"name": "clip_by_norm", "clip_norm": 1.0}, {"name": "adam"}]}, True),
        ({"chain": [{"name": "optax.clip", "max_delta": 1.0}], "groups": []}, True),
        ({"name": "adam", "groups": [{"match": "a", "freze": True}]}, False),
        ({"name": "adam", "groups": [{"freeze": True}]}, False),
        ({"name": "adam", "groups": {"match": "a"}}, False),
        ({"chain": [{"name": "clip_by_nrm", "clip_norm": 1.0}]}, False),
        ({"chain": [], "groups": []}, False),
        ({"chain": [{"name": "adam"}], "learning_rate": 0.1}, False),
        ({"name": "clip_by_norm", "clip_norm": 1.0}, False),
    ],
)
def test_the_schema_knows_groups_and_chains(validator, optimizer, is_valid):
    tables = tomllib.loads(HEAD) | {"optimizer": optimizer}
    assert validator.is_valid(tables) == is_valid
