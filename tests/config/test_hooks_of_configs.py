"""Hooks, triggers and fusing, as a config says them."""

from pathlib import Path

import jsonschema
import pytest
import regression
import tomli_w

from ftrain import hooks
from ftrain.config import ConfigError, build, json_schema, load, plan
from ftrain.training import at, every, first

CONFIG = """
task = "regression:regression"
steps = 20

[data]
batch_size = 8

[optimizer]
name = "adam"
learning_rate = 0.1

[step]
fuse = 5

[run]
recoveries = 1

[checkpoint]
listeners = ["regression:Printing"]

[log]
metrics = ["loss"]
first_steps = 3

[summary]
at_steps = [3, 9]
"""
HOOKS = """
[[hooks]]
name = "StopWhen"
metric = "eval/distance"
patience = 3
every_steps = 50

[[hooks]]
name = "StopOnNaN"
metrics = ["loss"]
locate = true

[[hooks]]
name = "Profiler"
at_steps = [5]

[[hooks]]
name = "Callback"
function = "regression:note"
every_secs = 2.5

[[hooks]]
name = "FinalOps"
function = "regression:final"

[[hooks]]
name = "FeedBatch"
function = "regression:feed_nothing"

[[hooks]]
name = "StepCounter"

[[hooks]]
name = "StopAtStep"
num_steps = 5

[[hooks]]
name = "WaitForStep"
step = 3
directory = "elsewhere"
timeout = 1.0

[[hooks]]
name = "DigestLog"
path = "ledger.jsonl"

[[hooks]]
name = "CrashBundle"
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG + HOOKS)
    return path


def test_every_hook_can_be_named(config, tmp_path):
    job = build(plan(load(config, [f"run.directory={tmp_path / 'run'}"])))
    others = {type(hook).__name__: hook for hook in job.others}
    stop = others["StopWhen"]
    assert (stop.metric, stop.patience, stop.when) == ("eval/distance", 3, every(steps=50))
    assert others["StopOnNaN"].metrics == ("loss",)
    assert others["StopOnNaN"].locate
    assert others["Profiler"].directory == tmp_path / "run"
    assert others["Callback"].function is regression.note
    assert others["Callback"].when == every(secs=2.5)
    assert others["StopAtStep"].num_steps == 5
    assert others["WaitForStep"].timeout == 1.0
    named = set(others) | {
        "CheckpointSaver",
        "SummarySaver",
        "Logging",
        "Evaluator",
    }  # these have tables
    kinds = {
        name
        for name, value in vars(hooks).items()
        if isinstance(value, type) and issubclass(value, hooks.Logging.__mro__[1])
    }
    assert kinds - named == {"DataFingerprint", "Faults", "LogFile", "ProgressBar"}


def test_triggers_and_the_rest(config):
    job = build(plan(load(config)))
    assert job.loop_options["fuse"] == 5
    assert job.loop_options["recoveries"] == 1
    assert job.logging.when == first(3)
    assert job.logging.metrics == ["loss"]
    assert job.summaries.when == at(3, 9)
    assert [type(listener) for listener in job.saver.listeners] == [regression.Printing]


def test_what_is_written_out_reads_back(config):
    resolved = plan(load(config)).resolved()
    assert resolved["hooks"][3]["function"] == "regression:note"
    again = config.with_name("again.toml")
    again.write_text(tomli_w.dumps(resolved))
    assert plan(load(again)).resolved() == resolved


def test_the_schema_knows_hooks(config):
    schema = json_schema()
    values = load(config).values
    jsonschema.validate(values, schema)
    for wrong in (
        {"name": "StopWhen", "patience": 3},
        {"name": "StopNever"},
        {"name": "Profiler", "stps": 3},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | {"hooks": [wrong]}, schema)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'name = "StopWen"',
            "hooks.0.name: there is no 'StopWen' in ftrain.hooks; did you mean StopWhen?",
        ),
        (
            'name = "StopWhen"\nmetric = "loss"\npatince = 2',
            "hooks.0.patince: unknown key; did you mean patience?",
        ),
        ('name = "StopWhen"', "hooks.0.metric: is missing, and it has no default"),
        (
            'name = "StopWhen"\nmetric = "loss"',
            "[hooks.0] StopWhen needs patience, or a threshold, or both",
        ),
        (
            'name = "CheckpointSaver"',
            "hooks.0.name: CheckpointSaver has its own table: use [checkpoint]",
        ),
        (
            'name = "Callback"\nfunction = "regression:nothing"',
            "regression has no function nothing",
        ),
        (
            'name = "Callback"\nfunction = 3',
            'hooks.0.function: must name a function, "package.module:name", got 3',
        ),
        (
            'name = "Callback"\nfunction = "regression:note"\nevery_steps = 3\nat_steps = [4]',
            "has two kinds of timing",
        ),
        ('metric = "loss"', "hooks.0.name: is missing; name one of Callback, FeedBatch"),
        (
            'name = ["StopWhen"]',
            "hooks.0.name: must be the name of a function, got ['StopWhen']; name one of",
        ),
        (
            'name = "WaitForStep"\nstep = 3\nread = "x"',
            'hooks.0.read: must name a function, "package.module:name"',
        ),
        ('name = "regression:regression"', "must return an ftrain.Hook"),
    ],
)
def test_a_mistake_names_the_hook(tmp_path, table, message):
    path = tmp_path / "job.toml"
    path.write_text(CONFIG + f"\n[[hooks]]\n{table}\n")
    with pytest.raises(ConfigError) as caught:
        build(plan(load(path)))
    assert message in str(caught.value)
    assert str(caught.value).count("\n") <= 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("step.fuse=0", 'fuse must be "auto" or a whole number >= 1, got 0'),
        ("step.fuse=always", "step.fuse: must be"),
        ("run.recoveries=-1", "recoveries must be a whole number >= 0, got -1"),
        ("hooks=3", "hooks: must be tables, [[hooks]], got 3"),
        ("log.format=5", 'log.format: must name a function, "package.module:name", got 5'),
        ("log.at_steps=[]", "at() needs steps that are whole numbers >= 1, got []"),
        (
            "checkpoint.listeners=['regression:nobody']",
            "checkpoint.listeners: 'regression:nobody' is missing",
        ),
        (
            "checkpoint.listeners=['regression:note']",
            "'regression:note' is not a subclass of ftrain.hooks.SaveListener",
        ),
    ],
)
def test_values_that_make_no_sense(config, override, message):
    with pytest.raises(ConfigError) as caught:
        build(plan(load(config, [override])))
    assert message in str(caught.value)
