"""Which checkpoints stay, and what is refused, compared with the reference's Saver."""

import jax.numpy as jnp
import numpy as np
import pytest
from references import cases

from ftrain.checkpoints import (
    CheckpointError,
    CheckpointManager,
    checkpoint_exists,
    checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_variable,
    open_reader,
)
from ftrain.formats import format_state, latest_tf_checkpoint, parse_state

pytestmark = pytest.mark.reference
SAVES = [case for case in cases("saver") if "events" in case]
CALLS = {case["note"]: case for case in cases("saver") if "events" not in case and "note" in case}
UNNUMBERED = 10**9  # stands for a checkpoint without a step; ours always have one


def step_of(name: str | None) -> int | None:
    if name is None:
        return None
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else UNNUMBERED


@pytest.mark.parametrize("case", SAVES, ids=lambda case: case["note"])
def test_the_same_checkpoints_stay(case, tmp_path):
    arguments = case["arguments"]
    now = 1e9
    manager = CheckpointManager(
        tmp_path,
        keep=arguments.get("max_to_keep", 5) or "all",
        keep_every_hours=arguments.get("keep_checkpoint_every_n_hours", 10000),
        clock=lambda: now,
    )
    for event in case["events"]:
        now += case["seconds_between_saves"]
        step = UNNUMBERED if event["global_step"] is None else event["global_step"]
        manager.save(step, {"x": jnp.ones(2)}, overwrite=True)
        assert manager.steps() == sorted(step_of(name) for name in event["on_disk"])
        assert manager.latest() == step_of(event["latest_checkpoint"])
        newest = [record.step for record in manager.checkpoints() if record.role == "newest"]
        if (
            manager.retention.keep != "all"
        ):  # the reference forgets which it saved if it is to keep all
            assert newest == [step_of(name) for name in event["last_checkpoints"]]
        state = parse_state(event["checkpoint_file"])
        assert step_of(state.latest) == manager.latest()
        assert format_state(state.latest, state.all) == event["checkpoint_file"]


@pytest.mark.parametrize("case", SAVES[:3], ids=lambda case: case["note"])
def test_the_same_checkpoints_stay_after_restarts(case, tmp_path):
    """With a new manager for every save, as after a process that was killed."""
    for event in case["events"]:
        manager = CheckpointManager(tmp_path, keep=case["arguments"].get("max_to_keep", 5) or "all")
        manager.save(event["global_step"], {"x": jnp.ones(2)})
        assert manager.steps() == sorted(step_of(name) for name in event["on_disk"])


@pytest.fixture
def manager(tmp_path) -> CheckpointManager:
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.save(1, {"a": jnp.array([1.0, 2.0])})
    return manager


def recorded(note: str) -> dict:
    if note not in CALLS:
        pytest.skip(f"not recorded: {note}")
    return CALLS[note]


def test_what_is_there_is_restored(manager):
    value = recorded("restore a variable that is in the checkpoint")["value"]
    np.testing.assert_array_equal(manager.restore(like={"a": jnp.zeros(2)})["a"], value)


REFUSED = {
    "restore a variable that is not in the checkpoint": lambda m: m.restore(
        like={"missing": jnp.zeros(2)}
    ),
    "restore with another shape": lambda m: m.restore(like={"a": jnp.zeros(3)}),
    "restore with another dtype": lambda m: m.restore(like={"a": jnp.zeros(2, jnp.int32)}),
    "restore from a prefix without files": lambda m: open_reader(m.directory / "nothing"),
    "load_variable of an unknown name": lambda m: load_variable(m.directory, "nobody"),
    "list_variables of a prefix without files": lambda m: list_variables(m.directory / "nothing"),
    "Saver in a graph without variables": lambda m: m.save(2, {}),
}


@pytest.mark.parametrize("note", REFUSED)
def test_what_the_reference_refuses_is_refused(manager, note):
    assert "error" in recorded(note)
    with pytest.raises(CheckpointError):
        REFUSED[note](manager)


def test_what_there_is_is_found(manager, tmp_path):
    (tmp_path / "empty").mkdir()
    assert checkpoint_exists(manager.directory / "1") == recorded("checkpoint_exists, yes")["value"]
    assert checkpoint_exists(manager.directory / "2") == recorded("checkpoint_exists, no")["value"]
    assert (
        latest_checkpoint(tmp_path / "empty")
        == recorded("latest_checkpoint of an empty directory")["value"]
    )
    assert (
        checkpoint_state(tmp_path / "empty")
        == recorded("get_checkpoint_state of an empty directory")["value"]
    )
    assert latest_checkpoint(manager.directory) == manager.directory / "1"


@pytest.mark.parametrize(
    "case", [case for case in cases("saver") if case["what"] == "checkpoint state file"]
)
def test_a_state_file_of_the_reference_is_followed(case, tmp_path):
    """Its paths are relative or absolute; <cwd> stands for the recorded working directory."""
    text = case["text"].replace("<cwd>", str(tmp_path))
    wanted = tmp_path / case["latest_checkpoint"].replace("<cwd>/", "")
    wanted.parent.mkdir(parents=True)
    (wanted.parent / "checkpoint").write_text(text)
    wanted.with_name(f"{wanted.name}.index").touch()
    assert latest_checkpoint(wanted.parent) == wanted
    state = parse_state(text)
    assert format_state(state.latest, state.all) == text
    assert [step_of(name) for name in state.all] == case["steps"][-case["max_to_keep"] :]


def test_a_state_file_that_names_what_is_gone(tmp_path):
    wanted = recorded("checkpoint file names a checkpoint whose files are gone")["value"]
    (tmp_path / "checkpoint").write_text(format_state(wanted["get_checkpoint_state"], []))
    assert latest_tf_checkpoint(tmp_path) == wanted["latest_checkpoint"]
    assert (
        parse_state((tmp_path / "checkpoint").read_text()).latest == wanted["get_checkpoint_state"]
    )
    with CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, {"x": jnp.ones(2)})
    (tmp_path / "ours" / "1").rename(tmp_path / "elsewhere")
    assert latest_checkpoint(tmp_path / "ours") is None
