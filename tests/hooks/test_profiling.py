"""The profiler: which steps it traces, and where the traces are."""

import re

import jax
import pytest
from regression import init_params, loss_fn

from ftrain import TrainState, make_step, optimizers
from ftrain.config import build, load, plan
from ftrain.hooks import CheckpointSaver, Logging, Profiler, StopAtStep
from ftrain.run import Run
from ftrain.training import Hook, Loop, at, every

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)


def drive(hooks, data, **options):
    state = TrainState.create(init_params(), SGD)
    with Loop(make_step(loss_fn, SGD), state, data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


def profiles(directory) -> list[str]:
    """Return the traces that TensorBoard's profile page finds; each has a complete file."""
    files = list(directory.glob("plugins/profile/*/*.xplane.pb"))
    assert all(file.stat().st_size > 1000 for file in files)
    names = sorted(file.parent.name for file in files)
    assert names == sorted(path.name for path in directory.glob("plugins/profile/*"))
    assert not list(directory.glob(".profiling*"))
    return names


@pytest.mark.parametrize("fuse", [1, 5])
def test_each_trace_has_a_directory_that_names_its_first_step(pipeline, tmp_path, fuse):
    drive([Profiler(tmp_path, at_steps=[5, 9, 30], steps=4), StopAtStep(40)], pipeline, fuse=fuse)
    assert profiles(tmp_path) == ["step_00000005", "step_00000009", "step_00000030"]


@pytest.mark.parametrize("fuse", [1, 5])
@pytest.mark.parametrize("steps", [3, 10])
def test_traces_repeat(pipeline, tmp_path, fuse, steps):
    drive([Profiler(tmp_path, every_steps=10, steps=steps), StopAtStep(35)], pipeline, fuse=fuse)
    assert profiles(tmp_path) == ["step_00000010", "step_00000020", "step_00000030"]


def test_a_trace_holds_the_steps_that_its_name_says(pipeline, tmp_path):
    """The steps are named by a hook, which is called before each of them."""

    class Naming(Hook):
        changes_batch = True

        def before_step(self, report, batch):
            with jax.profiler.TraceAnnotation(f"before_step_{report.step + 1:03}"):
                pass

    drive([Naming(), Profiler(tmp_path, every_steps=10, steps=3), StopAtStep(25)], pipeline)
    for first in (10, 20):
        (file,) = tmp_path.glob(f"plugins/profile/step_{first:08}/*.xplane.pb")
        found = {int(step) for step in re.findall(rb"before_step_(\d+)", file.read_bytes())}
        assert found == {first, first + 1, first + 2}


def test_a_trace_that_the_end_of_the_run_cuts_short_is_written(pipeline, tmp_path):
    drive([Profiler(tmp_path, at_steps=[1], steps=100), StopAtStep(6)], pipeline)
    assert profiles(tmp_path) == ["step_00000001"]


def test_a_trace_that_an_exception_cuts_short_is_written(pipeline, tmp_path):
    class Failing(Hook):
        when = at(6)

        def after_step(self, report):
            raise ValueError("in the hook")

    with pytest.raises(ValueError, match="in the hook"):
        drive([Profiler(tmp_path, at_steps=[3], steps=100), Failing()], pipeline)
    assert profiles(tmp_path) == ["step_00000003"]


def test_a_run_that_ends_before_the_first_traced_step_leaves_no_trace(pipeline, tmp_path):
    drive([Profiler(tmp_path, at_steps=[7]), StopAtStep(6)], pipeline)
    assert profiles(tmp_path) == []


def test_a_resumed_run_overwrites_no_trace_and_traces_what_is_left(pipeline, tmp_path):
    def train(last):
        saver = CheckpointSaver(tmp_path / "checkpoints", when=at(9, 21))
        return drive(
            [Profiler(tmp_path, every_steps=10, steps=3), saver, StopAtStep(last)], pipeline
        )

    class DyingError(Exception):
        pass

    class Killing(Hook):
        when = at(16)

        def after_step(self, report):
            raise DyingError

    hooks = [
        Profiler(tmp_path, every_steps=10, steps=3),
        CheckpointSaver(tmp_path / "checkpoints", when=at(9)),
    ]
    with pytest.raises(DyingError):
        drive([*hooks, Killing()], pipeline)
    assert profiles(tmp_path) == ["step_00000010"]
    assert train(21).start_step == 9
    assert profiles(tmp_path) == ["step_00000010", "step_00000010_2", "step_00000020"]
    assert train(25).start_step == 21
    assert profiles(tmp_path) == [
        "step_00000010",
        "step_00000010_2",
        "step_00000020",
        "step_00000022",
    ]


def test_a_profile_that_someone_else_takes_is_left_alone(pipeline, tmp_path):
    lines = []
    jax.profiler.start_trace(tmp_path / "own")
    try:
        drive(
            [Profiler(tmp_path, at_steps=[3]), Logging(write=lines.append), StopAtStep(10)],
            pipeline,
        )
    finally:
        jax.profiler.stop_trace()
    assert profiles(tmp_path) == []
    assert any(
        line.startswith("step 3 is not profiled: Profile has already been started")
        for line in lines
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps and at_steps must be >= 1"),
        ({"at_steps": [3, 5], "steps": 4}, "overlap"),
        ({"every_steps": 3, "steps": 4}, "every_steps must be >= steps, got 3 and 4"),
        ({"every_steps": 30, "at_steps": [4]}, "takes at_steps or every_steps, not both"),
    ],
)
def test_profiles_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Profiler(tmp_path, **options)


def test_a_config_can_repeat_profiles(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'task = "regression:regression"\nsteps = 24\n[data]\nbatch_size = 8\n'
        '[optimizer]\nname = "adam"\nlearning_rate = 0.1\n'
        '[[hooks]]\nname = "Profiler"\nevery_steps = 10\nsteps = 2\n'
    )
    job = build(plan(load(path, [f"run.directory={tmp_path / 'run'}"])))
    quiet = Logging(when=every(steps=100), write=lambda line: None)
    with Run(
        job.step, job.initial(), job.pipeline, steps=job.steps, hooks=[*job.others, quiet]
    ) as run:
        while not run.should_stop():
            run.advance()
    assert profiles(tmp_path / "run") == ["step_00000010", "step_00000020"]
