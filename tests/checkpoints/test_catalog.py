"""Which checkpoints stay."""

import itertools
import json

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.checkpoints import CheckpointError, CheckpointManager, Record
from ftrain.checkpoints.catalog import Retention, best_of, rotate


def tree(value: float = 1.0):
    return {"x": jnp.full(3, value)}


def save_all(manager: CheckpointManager, losses: dict[int, float]) -> list[int]:
    for step, loss in losses.items():
        manager.save(step, tree(), metrics={"loss": loss})
    return manager.steps()


def test_the_best_stay_beside_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2, keep_best=2)
    assert save_all(manager, {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.2, 5: 0.8, 6: 0.7}) == [2, 4, 5, 6]
    assert manager.best() == 2
    assert manager.latest() == 6


def test_the_best_can_be_the_largest(tmp_path):
    manager = CheckpointManager(
        tmp_path, keep=1, keep_best=1, best_metric="eval/accuracy", best_mode="max"
    )
    for step, accuracy in {1: 0.5, 2: 0.9, 3: 0.7}.items():
        manager.save(step, tree(), metrics={"eval/accuracy": accuracy, "loss": 0.0})
    assert manager.steps() == [2, 3]


def test_what_has_no_metric_or_none_that_is_a_number_is_not_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, keep_best=1)
    manager.save(1, tree())
    save_all(manager, {2: float("nan"), 3: 0.5, 4: float("-inf"), 5: 0.9})
    assert manager.steps() == [3, 5]


def test_one_every_so_many_steps_stays(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, keep_every_steps=4)
    assert save_all(manager, dict.fromkeys(range(1, 11), 0.0)) == [4, 8, 10]


def test_one_every_so_many_hours_stays_across_restarts(tmp_path):
    for step in range(1, 11):
        manager = CheckpointManager(
            tmp_path, keep=1, keep_every_hours=1, clock=lambda now=step * 1800.0: now
        )
        manager.save(step, tree())
    kept = [record for record in manager.checkpoints() if record.role == "kept"]
    gaps = [later.time - earlier.time for earlier, later in itertools.pairwise(kept)]
    assert len(kept) >= 3
    assert all(gap == 3600.0 for gap in gaps)


def test_what_is_pinned_stays_until_it_is_unpinned(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, tree())
    manager.pin(1)
    manager.save(2, tree())
    manager.save(3, tree())
    assert manager.steps() == [1, 3]
    with pytest.raises(CheckpointError, match="1 is pinned; unpin it first"):
        manager.delete(1)
    manager.pin(1, False)
    manager.save(4, tree())
    assert manager.steps() == [4]


def test_what_replaces_a_pinned_one_is_pinned(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, tree())
    manager.pin(1)
    manager.save(1, tree(2.0), overwrite=True)
    manager.save(2, tree())
    assert manager.steps() == [1, 2]


def test_keeping_more_than_before_deletes_nothing(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, keep_best=1)
    assert save_all(manager, {1: 1.0, 2: 2.0, 3: 3.0}) == [1, 3]
    manager = CheckpointManager(tmp_path, keep="all")
    assert save_all(manager, {4: 4.0, 5: 5.0}) == [1, 3, 4, 5]


def test_after_a_pause_not_every_checkpoint_is_kept(tmp_path):
    manager = CheckpointManager(
        tmp_path,
        keep=1,
        keep_every_hours=1,
        clock=iter([0.0, *range(10**6, 10**6 + 600, 60)]).__next__,
    )
    for step in range(1, 9):
        manager.save(step, tree())
    assert len(manager.steps()) <= 3


def test_a_clock_that_is_put_back_does_not_change_what_is_latest(tmp_path):
    times = iter([0.0, 1000.0, 500.0])
    manager = CheckpointManager(tmp_path, clock=lambda: next(times))
    manager.save(10, tree())
    manager.save(20, tree())
    (tmp_path / "checkpoints.json").unlink()
    assert manager.latest() == 20


def test_a_step_saved_anew_is_the_latest(tmp_path):
    """A run that went back to step 1 resumes from its newest save, not from its highest step."""
    manager = CheckpointManager(tmp_path, keep=3)
    for step in (1, 2, 3):
        manager.save(step, tree(step))
    manager.save(2, tree(7.0), overwrite=True)
    assert manager.latest() == 2
    assert float(manager.restore(like=tree())["x"][0]) == 7.0
    assert CheckpointManager(tmp_path).latest() == 2


def test_the_catalog_says_what_is_latest_and_when_each_was_saved(tmp_path):
    manager = CheckpointManager(tmp_path, clock=iter(range(100, 200)).__next__)
    manager.save(5, tree(), metrics={"loss": 0.25})
    manager.save(6, tree())
    catalog = json.loads((tmp_path / "checkpoints.json").read_text())
    assert catalog["latest"] == 6
    assert [(each["step"], each["metrics"]) for each in catalog["checkpoints"]] == [
        (5, {"loss": 0.25}),
        (6, {}),
    ]
    assert [record.time for record in manager.checkpoints()] == [101.0, 102.0]


def catalog(after="null", step="1", time="1", metrics="{}") -> str:
    record = (
        f'{{"step": {step}, "time": {time}, "metrics": {metrics}, "role": "kept", "pinned": true}}'
    )
    return f'{{"keep_after": {after}, "retention": {{}}, "checkpoints": [{record}, {record}]}}'


CATALOGS = [None, "", "{", "[]", '{"checkpoints": [{}], "keep_after": null}', "[" * 9999, catalog()]
CATALOGS += [catalog(after="[]"), catalog(step="1e400"), catalog(time="1e300"), catalog(time="NaN")]
CATALOGS += [catalog(metrics="[]"), catalog(metrics="null"), catalog(metrics='{"a": "b"}')]


@pytest.mark.parametrize("contents", CATALOGS)
def test_without_a_catalog_nothing_is_deleted(tmp_path, contents):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, tree(1.0))
    manager.pin(1)
    manager.save(2, tree(2.0))
    path = tmp_path / "checkpoints.json"
    path.unlink() if contents is None else path.write_text(contents)
    manager = CheckpointManager(tmp_path, keep=1)
    assert manager.latest() == 2
    manager.save(3, tree(3.0))
    manager.save(4, tree(4.0))
    assert manager.steps() == [1, 2, 4]


def test_a_checkpoint_that_a_killed_process_did_not_enter_is_found(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    manager.save(1, tree())
    before = (tmp_path / "checkpoints.json").read_text()
    manager.save(2, tree())
    (tmp_path / "checkpoints.json").write_text(
        before
    )  # killed between the rename and the update of the catalog
    manager = CheckpointManager(tmp_path, keep=2)
    assert manager.latest() == 2
    manager.save(3, tree())
    assert manager.steps() == [2, 3]


DRAWN = st.tuples(st.integers(0, 50), st.floats(0, 1e6), st.floats(-5, 5))
RECORDS = st.lists(DRAWN, max_size=15, unique_by=lambda drawn: drawn[0]).map(
    lambda drawn: [Record(step, time, {"loss": loss}) for step, time, loss in drawn]
)


@given(RECORDS, st.integers(1, 5), st.integers(0, 4), st.integers(1, 7))
def test_newest_best_and_regular_ones_always_stay(records, keep, best, every):
    policy = Retention(keep=keep, best=best, every_steps=every)
    kept, leaving, _ = rotate(records, policy, 0.0)
    steps = [record.step for record in kept]
    assert {record.step for record in records[-keep:]} <= set(steps)
    assert {record.step for record in best_of(records, policy, best)} <= set(steps)
    assert {record.step for record in records if record.step % every == 0} <= set(steps)
    assert sorted(steps + [record.step for record in leaving]) == sorted(
        record.step for record in records
    )
    again, gone, _ = rotate(kept, policy, 0.0)
    assert (again, gone) == (kept, [])  # nothing more is deleted without a new checkpoint


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep": 0}, "keep must be a whole number >= 1, or 'all', got 0"),
        ({"keep_every_steps": 0}, "keep_every_steps must be a whole number >= 1, got 0"),
        ({"keep_every_hours": 0}, "keep_every_hours must be > 0, got 0"),
        ({"keep_best": -1}, "keep_best must be >= 0, got -1"),
        ({"best_mode": "most"}, "best_mode must be 'min' or 'max', got 'most'"),
        (
            {"keep_best": 1, "best_metric": "eval/accuracy"},
            "keep_best by 'eval/accuracy' needs best_mode",
        ),
        ({"allow_nonfinite": ["("]}, "is not a regular expression"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        CheckpointManager(tmp_path, **wrong)
