import os
import tomllib
from pathlib import Path

import jax
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from ftrain.checkpoints import InUseError
from ftrain.config import ConfigError, build, claim, load, plan
from ftrain.gradients.guard import GuardState
from ftrain.gradients.loss_scaling import LossScaleState

CONFIG = """
task = "regression:regression"
steps = 20

[data]
batch_size = 8

[optimizer]
name = "momentum"
momentum = 0.9
learning_rate = { name = "cosine_decay", learning_rate = 0.1, decay_steps = 20 }
"""

SAVING = {  # what `[checkpoint]` says unless it is told otherwise
    "keep": 3,
    "keep_best": 0,
    "best_metric": "loss",
    "allow_nonfinite": [],
    "on_error": "stop",
    "at_start": False,
    "restore_best": False,
}


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def message_of(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        build(plan(load(path, overrides)))
    message = str(caught.value)
    assert message.count("\n") <= 1
    return message


def test_a_plan_is_written_out_in_full(config):
    resolved = plan(load(config, ["seed=3", "model.noise=0.5", "run.directory=/tmp/x"])).resolved()
    assert resolved["seed"] == 3
    assert resolved["model"] == {
        "examples": 64,
        "noise": 0.5,
        "sizes": [1, 2],
        "where": ".",
        "every_steps": 7,
    }
    assert resolved["optimizer"]["use_nesterov"] is False
    assert resolved["optimizer"]["learning_rate"]["alpha"] == 0.0
    assert resolved["checkpoint"] == {"every_secs": 600, **SAVING}
    assert resolved["step"]["fuse"] == "auto"
    assert resolved["run"]["directory"] == "/tmp/x"
    again = config.with_name("again.toml")
    again.write_text(tomli_w.dumps(resolved))
    assert plan(load(again)).resolved() == resolved


def test_optional_tables_wrap_the_optimizer(config):
    assert "guard" not in plan(load(config)).resolved()
    overrides = [
        "guard.spike=5.0",
        "loss_scaling.dynamic=false",
        "optimizer.slot_dtype=float32",
        "step.accumulate=2",
    ]
    planned = plan(load(config, overrides))
    assert planned.resolved()["guard"] == {"spike": 5.0, "window": 100, "patience": 10}
    state, metrics = build(planned).trace()
    assert isinstance(state.opt_state, LossScaleState)
    assert isinstance(state.opt_state.inner, GuardState)
    assert {"loss_scale", "update_skipped", "updates_skipped"} <= set(metrics)
    assert plan(load(config, ["guard={}"])).resolved()["guard"]["window"] == 100


def test_a_run_lives_under_the_name_of_its_config_unless_it_says_where(config):
    assert plan(load(config)).resolved()["run"]["directory"] == "runs/job"


def test_choosing_one_way_of_timing_switches_the_other_off(config):
    resolved = plan(load(config, ["checkpoint.every_steps=5"])).resolved()["checkpoint"]
    assert resolved == {"every_steps": 5, **SAVING}


def test_a_job_is_built_with_what_the_config_says(config):
    job = build(
        plan(load(config, ["checkpoint.keep=7", "step.clip_global_norm=0.5", "step.averages=0.9"]))
    )
    assert job.saver.manager.retention.keep == 7
    assert job.pipeline.batch_size == 8
    assert job.initial_state().averages is not None
    state, metrics = job.step(job.initial_state(), job.pipeline.batch(0))
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)
    assert jax.tree.structure(state) == jax.tree.structure(job.abstract_state())


@pytest.mark.standard_promotion  # optax.adam
@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        (['optimizer={name="optax.adamw", learning_rate=0.25}'], 0.25),
        (
            [
                'optimizer={name="optax.adamw", '
                'learning_rate={name="optax.constant_schedule", value=0.5}}'
            ],
            0.5,
        ),
        (['optimizer={name="ftrain.optimizers.adam:adam", learning_rate=0.125}'], 0.125),
    ],
)
def test_components_are_named_by_their_function(config, overrides, rate):
    job = build(plan(load(config, overrides)))
    _, metrics = job.step(job.initial_state(), job.pipeline.batch(0))
    assert float(metrics["learning_rate"]) == rate


def test_arguments_arrive_as_their_annotations_say(config):
    build(
        plan(
            load(
                config,
                [
                    "model.sizes=[3]",
                    "model.where=/tmp",
                    "model.options={a=1}",
                    "model.every_steps=2",
                ],
            )
        )
    )


def test_a_schedule_may_take_arrays(config):
    pieces = "{name='piecewise_constant', boundaries=[5, 10], values=[0.5, 0.25, 0.125]}"
    job = build(plan(load(config, [f"optimizer={{name='adam', learning_rate={pieces}}}"])))
    _, metrics = job.step(job.initial_state(), job.pipeline.batch(0))
    assert float(metrics["learning_rate"]) == 0.5
    assert "boundaries must be in ascending order" in message_of(
        config, f"optimizer={{name='adam', learning_rate={pieces.replace('[5, 10]', '[10, 5]')}}}"
    )


def test_averages_may_be_of_some_parameters(config):
    job = build(
        plan(
            load(config, ["step.averages=0.9", 'step.averages_of=["w"]', "step.averages_ramp=true"])
        )
    )
    assert job.initial_state().averages["b"] is None
    message = "step.averages_of: needs step.averages, a decay such as 0.999"
    assert message in message_of(config, 'step.averages_of=["w"]')


def test_averages_need_a_decay(config):
    assert "evaluation.use_averages needs step.averages" in message_of(
        config, "evaluation.use_averages=true"
    )


BAD = [
    (["data.batchsize=4"], "command line: data.batchsize: unknown key; did you mean batch_size?"),
    (["optimiser.name=adam"], "command line: optimiser: unknown key; did you mean optimizer?"),
    (["sed=1"], "command line: sed: unknown key; did you mean seed?"),
    (
        ["optimizer.learning_rate.decay_step=3"],
        "optimizer.learning_rate.decay_step: unknown key; did you",
    ),
    (["model.exmples=3"], "model.exmples: unknown key; did you mean examples?"),
    (
        ["data.batch_size=lots"],
        "command line: data.batch_size: must be a valid integer, got 'lots'",
    ),
    (["data.batch_size=4.5"], "data.batch_size: must be a valid integer, got 4.5"),
    (["data.shuffle=1"], "data.shuffle: must be a valid boolean, got 1"),
    (
        ["optimizer.learning_rate=fast"],
        "optimizer.learning_rate: must be a valid number, got 'fast'",
    ),
    (
        ["optimizer.learning_rate=nan"],
        "optimizer.learning_rate: must be a finite number, got nan",
    ),
    (
        ["optimizer.learning_rate=true"],
        "optimizer.learning_rate: must be a valid number, got True",
    ),
    (["steps=0"], "command line: steps: must be at least 1, got 0"),
    (["seed=-1"], "command line: seed: must be at least 0 and below 2**32, got -1"),
    (["data.batch_size=0"], "command line: [data] batch_size must be >= 1, got 0"),
    (["data.batch_size=65"], "[data] batch_size 65 is larger than the data, which has 64 examples"),
    (
        ["mesh.data=3"],
        "data.batch_size: batch_size 8 does not divide over the 3 devices of the mesh; use 6",
    ),
    (["mesh.data=99"], "[mesh] data must be -1 or between 1 and the 4 available devices, got 99"),
    (
        ["optimizer.slot_dtype=flot32"],
        "[optimizer] slot_dtype must be a dtype of real numbers, such as float32, got",
    ),
    (["guard.spike=0.5"], "command line: [guard] spike must be > 1, got 0.5"),
    (["guard.spikes=5"], "guard.spikes: unknown key; did you mean spike?"),
    (["loss_scaling.scale=0.0"], "command line: [loss_scaling] scale must be > 0, got 0.0"),
    (["step.accumulate=0"], "command line: [step] accumulate must be a whole number >= 1, got 0"),
    (["optimizer.momentum=-1.0"], "command line: [optimizer] momentum must be >= 0, got -1.0"),
    (
        ["optimizer.learning_rate.decay_steps=0"],
        "[optimizer.learning_rate] decay_steps must be > 0, got 0",
    ),
    (
        ["checkpoint.keep=0"],
        "command line: [checkpoint] keep must be a whole number >= 1, or 'all', got 0",
    ),
    (["checkpoint.every_steps=0"], "every() needs steps > 0, got 0"),
    (
        ["optimizer.name=adm"],
        "optimizer.name: there is no 'adm' in ftrain.optimizers; did you mean adam?",
    ),
    (["optimizer.name=from_rule"], "there is no 'from_rule' in ftrain.optimizers"),
    (
        ["optimizer.name=optax.adamx"],
        "'optax.adamx' is missing: optax has no function adamx; did you mean adam",
    ),
    (["optimizer.name=nowhere.at_all:make"], "'nowhere.at_all:make' cannot be imported"),
    (["optimizer.name=.relative"], "'.relative' is not a valid name; write package.module:name"),
    (
        ["optimizer.name=3"],
        "optimizer.name: must be the name of a function, got 3; name one of adadelta, ad",
    ),
    (
        ["optimizer.learning_rate={rate=1}"],
        "optimizer.learning_rate.name: is missing; name one of ",
    ),
    (["task=digit"], "task: there is no 'digit' in ftrain.tasks; did you mean digits?"),
    (
        ["task=regression:nothing"],
        "'regression:nothing' is missing: regression has no function nothing",
    ),
    (
        ["task=regression:broken"],
        "[model] broken must return an ftrain.tasks.Task, got 'not a task'",
    ),
    (["seed=4294967296"], "seed: must be at least 0 and below 2**32, got 4294967296"),
    (
        ["optimizer={name='os.getcwd'}"],
        "[optimizer] getcwd must return an optax.GradientTransformation, got '",
    ),
    (
        ["optimizer={name='builtins.max'}"],
        "'builtins.max' cannot be used: it has no signature",
    ),
    (["optimizer={name='math.sqrt', x=3}"], "[optimizer] math.sqrt() takes no keyword arguments"),
    (
        ["optimizer={name='optax.adamw', learning_rate='fast'}"],
        "optimizer.learning_rate: must be a valid number",
    ),
    (
        ["optimizer.learning_rate={name='os.getcwd'}"],
        "[optimizer.learning_rate] getcwd must return a schedule",
    ),
    (
        ["optimizer.name=gradient_descent"],
        "unknown key of gradient_descent; to replace the whole table: opti",
    ),
    (["optimizer.name=9x.y:z"], "'9x.y:z' is not a valid name; write package.module:name"),
    (["model.sizes=[1, 'x']"], "model.sizes.1: must be a valid integer, got 'x'"),
    (["data.batch_size=" + "9" * 5000], "data.batch_size: must be a valid integer, got '999"),
    (["data=3"], "command line: data: must be a table, [data], got 3"),
    (["steps.more=3"], "steps.more: steps is the value 20, not a table with keys"),
    (["nonsense"], "'nonsense' is not an override; write key=value"),
    (["=3"], "'=3' is not an override"),
    (["data..x=3"], "'data..x=3' is not an override"),
]


@pytest.mark.parametrize(("overrides", "expected"), BAD, ids=lambda value: str(value)[:60])
def test_a_mistake_is_one_line_that_names_it(config, overrides, expected):
    assert expected in message_of(config, *overrides)


def test_a_mistake_in_the_file_names_the_file(config):
    config.write_text(CONFIG.replace("batch_size = 8", "batch_size = 'x'"))
    assert message_of(config).startswith(f"{config}: data.batch_size: must be a valid integer")
    config.write_text(CONFIG.replace("batch_size = 8", ""))
    assert message_of(config) == f"{config}: data.batch_size: is missing, and it has no default"
    config.write_text(CONFIG.replace("[optimizer]", "[optimizer"))
    assert f"{config}: is not valid TOML" in message_of(config)
    config.write_bytes(b"\xff\xfe")
    assert f"{config}: is not UTF-8 text" in message_of(config)


def test_a_missing_file_names_its_neighbours(config):
    wrong = config.with_name("jib.toml")
    assert message_of(wrong) == f"{wrong}: there is no such file; there are {config}"
    assert (
        f"{config.parent}: is a directory without a config.toml; there are {config}\n"
        in message_of(config.parent)
    )


NAMES = st.sampled_from(
    ["adam", "optax.lion", "optax.chain", "optax.MultiSteps", "builtins.dict", "os.getcwd", "a:b"]
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        "task",
        "steps",
        "seed",
        "data",
        "optimizer",
        "name",
        "learning_rate",
        "batch_size",
        "every_steps",
        "run",
        "extends",
    ]
)
TOML_SCALARS = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=8) | NAMES
)
SCALARS = st.none() | TOML_SCALARS
VALUES = st.recursive(
    TOML_SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def refusal(path, overrides=()) -> str | None:
    """Return the error message, or None if the config is planned; any other exception fails."""
    try:
        build(plan(load(path, overrides)))
    except ConfigError as error:
        message = str(error)
    else:
        return None
    assert message.count("\n") <= 1
    return message


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_toml_is_planned_or_refused_in_words(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.toml"
    path.write_text(tomli_w.dumps(tomllib.loads(CONFIG) | values), encoding="utf-8")
    assert refusal(path) != ""


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_loaded_or_refused_in_words(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.toml"
    path.write_bytes(content)
    assert str(path) in (refusal(path) or str(path))


@given(
    st.lists(
        st.text(max_size=20) | st.builds("{}={}".format, KEYS, st.text(max_size=12)), max_size=4
    )
)
def test_any_override_is_planned_or_refused_in_words(tmp_path_factory, overrides):
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.toml"
    path.write_text(CONFIG)
    assert refusal(path, overrides) != ""


def claim_and_start(directory, values, **options):
    """Claim a directory and leave a checkpoint in it, as a run does."""
    claim(directory, values, **options).close()
    (directory / "checkpoints" / "10").mkdir(exist_ok=True)


def test_a_directory_belongs_to_its_first_config(tmp_path):
    claim_and_start(tmp_path / "run", {"steps": 3, "data": {"batch_size": 4}})
    claim_and_start(tmp_path / "run", {"steps": 3, "data": {"batch_size": 4}})
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path / "run", {"steps": 3, "data": {"batch_size": 8}, "seed": 1})
    assert "data.batch_size was 4, now 8; seed was not set, now 1" in str(caught.value)
    assert "--accept-changes" in str(caught.value)


def test_a_run_of_an_older_version_resumes_with_its_old_key(config, tmp_path):
    home = tmp_path / "run"
    resolved = plan(load(config, [f"run.directory={home}"])).resolved()
    claim_and_start(home, resolved)
    saved = (home / "config.toml").read_text()
    assert "allow_nonfinite = []" in saved
    (home / "config.toml").write_text(saved.replace("allow_nonfinite", "may_be_infinite"))
    assert plan(load(home)).resolved() == resolved
    claim(home, resolved).close()
    assert (home / "config.toml").read_text() == saved
    assert "may_be_infinite" in message_of(config, "checkpoint.may_be_infinite=[]")


def test_a_run_of_an_older_version_resumes_with_its_old_sharding_key(config, tmp_path):
    home = tmp_path / "run"
    overrides = [f"run.directory={home}", "sharding.min_size=4096"]
    resolved = plan(load(config, overrides)).resolved()
    claim_and_start(home, resolved)
    saved = (home / "config.toml").read_text()
    assert "min_size = 4096" in saved
    (home / "config.toml").write_text(saved.replace("min_size = ", "least = "))
    assert plan(load(home)).resolved() == resolved
    claim(home, resolved).close()
    assert (home / "config.toml").read_text() == saved
    assert "least" in message_of(config, "sharding.least=4096")


def test_a_run_of_an_older_version_resumes_with_the_old_name_of_a_hook(config, tmp_path):
    home = tmp_path / "run"
    config.write_text(f'{config.read_text()}\n[[hooks]]\nname = "DigestLog"\npath = "digests"\n')
    resolved = plan(load(config, [f"run.directory={home}"])).resolved()
    claim_and_start(home, resolved)
    saved = (home / "config.toml").read_text()
    (home / "config.toml").write_text(saved.replace('"DigestLog"', '"Ledger"'))
    assert plan(load(home)).resolved() == resolved
    claim(home, resolved).close()
    assert (home / "config.toml").read_text() == saved


def test_a_run_without_a_checkpoint_can_still_change(tmp_path):
    claim(tmp_path, {"steps": 3}).close()
    claim(tmp_path, {"steps": 4}).close()
    assert tomllib.loads((tmp_path / "config.toml").read_text()) == {"steps": 4}


def test_changes_that_are_accepted_keep_the_old_config(tmp_path):
    for steps in (3, 4, 5):
        claim_and_start(tmp_path, {"steps": steps}, accept_changes=True)
    found = {
        path.name: tomllib.loads(path.read_text())["steps"] for path in tmp_path.glob("*.toml")
    }
    assert found == {"config.toml": 5, "config.1.toml": 3, "config.2.toml": 4}


def test_one_process_at_a_time_works_in_a_directory(tmp_path):
    with (
        claim(tmp_path, {"steps": 3}),
        pytest.raises(InUseError, match=f"in use by process {os.getpid()}; wait"),
    ):
        claim(tmp_path, {"steps": 3})
    claim(tmp_path, {"steps": 3}).close()


def test_a_damaged_config_of_a_run_is_left_alone(tmp_path):
    claim_and_start(tmp_path, {"steps": 3})
    (tmp_path / "config.toml").write_text("steps = = 3")
    with pytest.raises(
        ConfigError, match=r"config.toml: is not valid TOML.*\nnothing was changed; repair it"
    ):
        claim(tmp_path, {"steps": 3}, accept_changes=True)
    assert (tmp_path / "config.toml").read_text() == "steps = = 3"


def test_a_directory_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"file/run cannot be written: Not a directory; choose another run.dir"
    ):
        claim(tmp_path / "file" / "run", {"steps": 3})
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        claim(tmp_path, {"steps": 3})
