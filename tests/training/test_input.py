"""The loop on all kinds of pipelines: data that end, buckets of shapes, records, transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn, make_arrays

import ftrain
from ftrain.data import (
    ArraySource,
    Buckets,
    MapSource,
    Pad,
    Pipeline,
    RangeSource,
    RecordSource,
    example_lengths,
)
from ftrain.formats import Fixed, RecordWriter, encode_example
from ftrain.hooks import Logging

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = ftrain.optimizers.gradient_descent(0.05)
QUIET = Logging(write=lambda line: None)


def train(data, steps=100, loss=loss_fn, params=None, **options):
    params = init_params() if params is None else params
    return ftrain.train(loss, params, data, optimizer=SGD, steps=steps, hooks=[QUIET], **options)


@pytest.mark.parametrize("fuse", [1, 4, "auto"])
def test_a_run_ends_with_its_data(fuse):
    data = Pipeline(ArraySource(make_arrays()), batch_size=8, epochs=3)
    step = ftrain.make_step(loss_fn, SGD)
    state = ftrain.TrainState.create(init_params(), SGD)
    with ftrain.Run(step, state, data, steps=1000, hooks=[QUIET], fuse=fuse) as run:
        while not run.should_stop():
            run.advance()
    assert int(run.state.step) == 24


def test_a_smaller_last_batch_is_trained_on_without_a_warning():
    data = Pipeline(ArraySource(make_arrays(60)), batch_size=8, epochs=1, last="keep")
    assert int(train(data).step) == 8


def write_words(example):
    return {"words": np.full(example["index"] % 9 + 1, example["index"] % 5)}


def count_words(params, batch, rng):
    shares = jax.nn.softmax(params["scores"])[batch["words"]]
    return -jnp.mean(jnp.log(jnp.where(batch["words"] >= 0, shares, 1.0)))


def bucketed(**options) -> Pipeline:
    source = MapSource(RangeSource(90), write_words, each=True)
    buckets = Buckets(example_lengths(source, "words"), [3, 6, 9])
    return Pipeline(
        source, batch_size=6, buckets=buckets, pad={"words": Pad(value=-1)}, seed=5, **options
    )


@pytest.mark.parametrize("options", [{}, {"threads": 2}])
def test_buckets_of_several_shapes_are_trained_on_and_resumed_exactly(tmp_path, options):
    def run(steps, directory):
        params = {"scores": jnp.zeros(5)}
        return train(bucketed(**options), steps, count_words, params, directory=directory).params[
            "scores"
        ]

    whole = run(60, tmp_path / "whole")
    run(23, tmp_path / "parts")
    np.testing.assert_array_equal(run(60, tmp_path / "parts"), whole)


def test_records_train_as_arrays_do(tmp_path):
    arrays = make_arrays()
    with RecordWriter(tmp_path / "train.tfrecord", shard_records=20) as writer:
        for x, y in zip(arrays["x"], arrays["y"], strict=True):
            writer.write(encode_example({"x": x, "y": y}))
    source = RecordSource(str(tmp_path / "train-*"), {"x": Fixed((3,)), "y": Fixed()})
    from_records = train(Pipeline(source, batch_size=8, seed=3)).params
    from_memory = train(Pipeline(ArraySource(arrays), batch_size=8, seed=3)).params
    jax.tree.map(np.testing.assert_array_equal, from_records, from_memory)


def test_what_no_device_takes_is_named():
    names = np.array([b"a", b"b", b"c", b"d"] * 16, object)
    data = Pipeline(ArraySource(make_arrays() | {"name": names}), batch_size=8)
    with pytest.raises(
        TypeError, match="name holds bytes, which no device supports: remove it from the spec"
    ):
        train(data)


def test_an_error_of_a_source_ends_the_run_and_says_where():
    def fail(batch):
        if 17 in batch["index"]:
            raise OSError("disk on fire")
        return make_arrays(len(batch["index"]))

    data = Pipeline(MapSource(RangeSource(64), fail), batch_size=8, shuffle=False)
    with pytest.raises(OSError, match="disk on fire") as caught:
        train(data)
    assert any(
        "input of step 3 from MapSource(RangeSource(64)" in note for note in caught.value.__notes__
    )


@pytest.mark.parametrize("fuse", [1, 4])
@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (np.array([7, 2**32 + 1]), "ids has the value 4294967297, which int32 cannot hold"),
        (np.array([-(2**31) - 1, 7]), "ids has the value -2147483649, which int32 cannot hold"),
        (np.array([2**32, 7], np.uint64), "ids has the value 4294967296, which uint32 cannot hold"),
    ],
)
def test_integers_that_jax_would_cut_off_are_refused(ids, told, fuse):
    """2**32 + 1 would become 1, and the row of another id be trained."""
    data = Pipeline(ArraySource({"ids": np.tile(ids, 8)}), batch_size=4)
    with pytest.raises(ValueError, match=told):
        train(
            data,
            8,
            lambda params, batch, rng: jnp.sum(params["w"]) * jnp.mean(batch["ids"]),
            fuse=fuse,
        )


@pytest.mark.standard_promotion  # the loss multiplies parameters by integers
@pytest.mark.parametrize(
    "ids", [np.array([-(2**31), 2**31 - 1]), np.array([0, 2**32 - 1], np.uint64)]
)
def test_integers_of_64_bits_that_fit_are_trained_on(ids):
    data = Pipeline(ArraySource({"ids": np.tile(ids, 8)}), batch_size=4)
    assert (
        int(
            train(
                data, 2, lambda params, batch, rng: jnp.mean(params["w"] * batch["ids"].max())
            ).step
        )
        == 2
    )
