"""`ftrain.evaluate`: exact over padding, devices and batch sizes."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import f1_score, roc_auc_score

import ftrain
import ftrain.metrics as metrics
from ftrain import TrainState, WeightedMean
from ftrain.cluster import Sharding, make_mesh
from ftrain.data import ArraySource, Buckets, Pad, Pipeline, Stream
from ftrain.data.source import stack_objects
from ftrain.training.state import place

pytestmark = pytest.mark.usefixtures("no_thread_left")
RNG = np.random.default_rng(0)
ARRAYS = {
    "x": RNG.normal(size=(37, 5)).astype(np.float32),
    "label": RNG.integers(2, size=37).astype(np.int32),
    "tokens": RNG.integers(1, 5, 37).astype(np.int32),
}
PARAMS = {"w": RNG.normal(size=(5, 2)).astype(np.float32)}
LOGITS = ARRAYS["x"] @ PARAMS["w"]
LOSSES = np.asarray(optax.softmax_cross_entropy_with_integer_labels(LOGITS, ARRAYS["label"]))
METRICS = {
    "accuracy": metrics.accuracy(),
    "f1": metrics.f1("weighted"),
    "auc": metrics.auc(),
    "confusion": metrics.confusion_matrix(),
    "loss": metrics.mean(),
}


def predict(params, batch):
    logits = batch["x"] @ params["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"logits": logits, "loss": losses}


def make_pipeline(batch_size=8, **options) -> Pipeline:
    options = {"epochs": 1, "last": "pad", "shuffle": False} | options
    return Pipeline(ArraySource(ARRAYS), batch_size=batch_size, **options)


def check(found) -> None:
    predicted = np.argmax(LOGITS, -1)
    assert found["accuracy"] == pytest.approx(np.mean(predicted == ARRAYS["label"]), abs=1e-12)
    assert found["f1"] == pytest.approx(f1_score(ARRAYS["label"], predicted, average="weighted"))
    margin = LOGITS[:, 1] - LOGITS[:, 0]
    assert found["auc"] == pytest.approx(roc_auc_score(ARRAYS["label"], margin), abs=1e-9)
    assert found["confusion"].sum() == 37
    assert found["loss"] == pytest.approx(LOSSES.mean(), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 5, 8, 37, 64])
@pytest.mark.parametrize("last", ["pad", "keep"])
def test_every_example_counts_once_whatever_the_batch_size(batch_size, last):
    check(ftrain.evaluate(predict, PARAMS, make_pipeline(batch_size, last=last), METRICS))


def test_results_come_in_the_order_of_the_metrics():
    found = ftrain.evaluate(predict, PARAMS, make_pipeline(), METRICS)
    assert list(found) == list(METRICS)


def test_shuffled_data_several_threads_and_a_pipeline_of_two_epochs():
    check(ftrain.evaluate(predict, PARAMS, make_pipeline(shuffle=True, threads=2), METRICS))
    twice = ftrain.evaluate(predict, PARAMS, make_pipeline(epochs=2), {"loss": metrics.mean()})
    assert twice["loss"] == pytest.approx(LOSSES.mean(), rel=1e-6)


def batches_of(*sizes):
    start = 0
    for size in sizes:
        yield {name: array[start : start + size] for name, array in ARRAYS.items()}
        start += size


def test_batches_of_an_iterable_and_of_a_stream():
    check(ftrain.evaluate(predict, PARAMS, batches_of(10, 10, 10, 7), METRICS))
    check(ftrain.evaluate(predict, PARAMS, list(batches_of(3, 30, 4)), METRICS))
    examples = [{name: array[row] for name, array in ARRAYS.items()} for row in range(37)]
    check(ftrain.evaluate(predict, PARAMS, Stream(examples, batch_size=8, last="keep"), METRICS))


@pytest.mark.parametrize("devices", [{"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "model": 2}])
@pytest.mark.parametrize("batch_size", [6, 8])
def test_devices_change_nothing(devices, batch_size):
    """Batches that do not divide over the devices are padded."""
    mesh = make_mesh(**devices)
    for last in ("pad", "keep"):
        data = make_pipeline(batch_size, last=last)
        check(ftrain.evaluate(predict, PARAMS, data, METRICS, mesh=mesh))


def test_a_state_is_evaluated_on_its_own_mesh_where_it_is():
    mesh = make_mesh(data=2, fsdp=2)
    whole = {"w": np.tile(PARAMS["w"], (1, 1))}
    state = place(TrainState.create(whole, optax.sgd(0.1)), mesh, Sharding(min_size=1))
    found = []

    def watched(params, batch):
        found.append(len(batch["x"]))
        return predict(params, batch)

    check(ftrain.evaluate(watched, state, make_pipeline(8), METRICS))
    assert found == [8]


def test_one_program_is_compiled_and_it_is_kept_as_long_as_the_function():
    traces = []

    def counted(params, batch):
        traces.append(batch["x"].shape)
        return predict(params, batch)

    for last in ("pad", "keep"):
        ftrain.evaluate(counted, PARAMS, make_pipeline(last=last), {"a": metrics.accuracy()})
    assert traces == [(8, 5)]
    ftrain.evaluate(counted, PARAMS, make_pipeline(), {"a": metrics.f1()})
    assert len(traces) == 2
    known = weakref.ref(counted)
    del counted
    gc.collect()
    assert known() is None


def test_a_method_and_an_object_that_cannot_be_hashed_are_functions_too():
    class Model:
        traces = 0

        def predict(self, params, batch):
            self.traces += 1
            return predict(params, batch)

    model = Model()
    for _ in range(2):
        check(ftrain.evaluate(model.predict, PARAMS, make_pipeline(), METRICS))
    assert model.traces == 1

    class Unhashable(dict):
        def __call__(self, params, batch):
            return predict(params, batch)

    check(ftrain.evaluate(Unhashable(), PARAMS, make_pipeline(), METRICS))


def test_without_metrics_every_output_is_averaged():
    def outputs(params, batch):
        losses = predict(params, batch)["loss"]
        weights = batch["tokens"].astype(jnp.float32)  # zero in the padding, as all entries are
        bits = WeightedMean.of(losses, weights * batch["mask"])
        return {"loss": losses, "bits": bits, "pairs": jnp.stack([losses, 2 * losses], 1)}

    found = ftrain.evaluate(outputs, PARAMS, make_pipeline())
    assert found["loss"] == pytest.approx(LOSSES.mean(), rel=1e-6)
    assert found["bits"] == pytest.approx(np.average(LOSSES, weights=ARRAYS["tokens"]), rel=1e-6)
    assert found["pairs"] == pytest.approx(1.5 * LOSSES.mean(), rel=1e-6)


def test_sums_over_many_batches_lose_nothing():
    """In float32 the small losses would be lost beside the large one."""
    losses = np.full(1001, 1.0, np.float32)
    losses[0] = 2**25
    data = [{"loss": losses[at : at + 1]} for at in range(1001)]
    found = ftrain.evaluate(lambda params, batch: {"loss": batch["loss"]}, {}, data)
    assert found["loss"] == (2**25 + 1000) / 1001


def test_a_mask_of_the_data_weighs_the_examples():
    weights = RNG.uniform(0, 2, 37).astype(np.float32)
    source = ArraySource(ARRAYS | {"mask": weights})
    for last in ("pad", "keep"):
        data = Pipeline(source, batch_size=8, epochs=1, last=last)
        found = ftrain.evaluate(predict, PARAMS, data, {"loss": metrics.mean()})
        assert found["loss"] == pytest.approx(np.average(LOSSES, weights=weights), rel=1e-6)


def test_a_mask_of_tokens_is_zero_in_the_padding():
    tokens = RNG.integers(2, size=(37, 3)).astype(bool)
    source = ArraySource(ARRAYS | {"mask": tokens})

    def per_token(params, batch):
        losses = predict(params, batch)["loss"][:, None] * jnp.arange(1.0, 4.0)
        return {"all": losses, "kept": WeightedMean.of(losses, batch["mask"])}

    expected = LOSSES[:, None] * np.arange(1.0, 4.0)
    for last in ("pad", "keep"):
        data = Pipeline(source, batch_size=8, epochs=1, last=last)
        found = ftrain.evaluate(per_token, PARAMS, data)
        assert found["all"] == pytest.approx(expected.mean(), rel=1e-6)
        assert found["kept"] == pytest.approx(expected[tokens].mean(), rel=1e-6)


def test_batches_of_buckets():
    rows = [np.ones(1 + at % 7, np.float32) for at in range(37)]
    source = ArraySource({"x": np.array(rows, object), "y": np.arange(37.0, dtype=np.float32)})
    lengths = np.array([len(row) for row in rows])
    buckets = Buckets(lengths, boundaries=[3, 7], batch_sizes=[8, 4])

    def outputs(params, batch):
        return {"y": batch["y"], "length": jnp.sum(batch["x"], axis=1)}

    for last in ("pad", "keep"):
        data = Pipeline(
            source, batch_size=4, epochs=1, last=last, buckets=buckets, pad={"x": Pad()}
        )
        found = ftrain.evaluate(outputs, {}, data)
        assert found == {"y": pytest.approx(18.0), "length": pytest.approx(lengths.mean())}


def test_the_model_state_and_the_averages():
    state = TrainState.create(
        PARAMS, optax.sgd(0.1), averages=True, model_state={"shift": jnp.ones(())}
    )
    state = state.replace(averages=jax.tree.map(lambda leaf: leaf * 0, state.averages))

    def shifted(params, batch, model_state):
        return {"x": jnp.sum(batch["x"] @ params["w"], axis=1) + model_state["shift"]}

    expected = LOGITS.sum(1).mean() + 1
    assert ftrain.evaluate(shifted, state, make_pipeline())["x"] == pytest.approx(expected, 1e-5)
    found = ftrain.evaluate(shifted, state, make_pipeline(), use_averages=True)
    assert found["x"] == pytest.approx(1.0)
    bare = ftrain.evaluate(shifted, PARAMS, make_pipeline(), model_state={"shift": np.zeros(())})
    assert bare["x"] == pytest.approx(expected - 1, abs=1e-5)
    with pytest.raises(TypeError, match=r"called as function\(params, batch, model_state\)"):
        ftrain.evaluate(predict, state, make_pipeline())
    with pytest.raises(TypeError, match="because there is no model state"):
        ftrain.evaluate(shifted, PARAMS, make_pipeline())
    with pytest.raises(ValueError, match="the state has its own"):
        ftrain.evaluate(shifted, state, make_pipeline(), model_state={})
    with pytest.raises(ValueError, match="use_averages needs a TrainState"):
        ftrain.evaluate(predict, PARAMS, make_pipeline(), use_averages=True)
    plain = TrainState.create(PARAMS, optax.sgd(0.1))
    with pytest.raises(ValueError, match="use_averages needs averages"):
        ftrain.evaluate(predict, plain, make_pipeline(), use_averages=True)


def returning(outputs):
    return lambda params, batch: outputs(batch)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda batch: batch["x"], "must return a dict"),
        (lambda batch: {"loss": jnp.mean(batch["x"])}, "a mean over a batch is a sum and a weight"),
        (lambda batch: {"loss": batch["x"][:3]}, "expected 8 examples along its first axis"),
        (lambda batch: {"loss": WeightedMean(batch["x"], 1.0)}, "expected a number as its total"),
        (lambda batch: {"loss": "low"}, "must be an array or a WeightedMean, got str"),
    ],
)
def test_outputs_that_are_no_sum_and_weight(outputs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ftrain.evaluate(returning(outputs), PARAMS, make_pipeline())


def test_metrics_that_are_none():
    for wrong, message in (
        ({"x": 3}, "metric x must be an ftrain.metrics.Metric, got 3"),
        ({"x": metrics.mean("y")}, "metric x: no entry 'y' to measure"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ftrain.evaluate(predict, PARAMS, make_pipeline(), wrong)
    text = metrics.Metric(lambda: 0.0, lambda a, v, m: a, lambda a, b: a, lambda a: "good")
    with pytest.raises(TypeError, match="metric x must compute a number"):
        ftrain.evaluate(predict, PARAMS, make_pipeline(), {"x": text})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: make_pipeline(epochs=None), r"never ends.*epochs=1"),
        (lambda: make_pipeline(last="drop"), "drops the last 5 examples"),
        (lambda: make_pipeline(shard_index=0, shard_count=2), "part 0 of 2 of every batch"),
        (list, "there is no batch to evaluate"),
        (lambda: ARRAYS, "data is a dict"),
        (lambda: [ARRAYS["x"]], "batches that are dicts of arrays"),
        (lambda: [{"x": ARRAYS["x"], "label": 3}], "one first axis of examples"),
        (lambda: [{"x": np.array(["a"])}], "which no device supports"),
        (lambda: [ARRAYS | {"id": np.full(37, 2**40)}], "which int32 cannot hold"),
    ],
)
def test_data_that_cannot_be_evaluated(data, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ftrain.evaluate(predict, PARAMS, data())


def test_an_error_of_the_data_is_raised():
    def broken():
        yield next(batches_of(8))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        ftrain.evaluate(predict, PARAMS, broken())


def test_what_is_evaluated_must_be_callable_and_parameters_arrays():
    with pytest.raises(TypeError, match="function must be callable"):
        ftrain.evaluate(3, PARAMS, make_pipeline())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="params must be a tree of arrays"):
        ftrain.evaluate(predict, {"w": "x"}, make_pipeline())


def test_ragged_rows_of_the_padding_are_empty():
    rows = np.array([np.arange(1 + at % 3) + 1 for at in range(5)], object)
    pads = {"x": Pad(4, lengths="length")}
    data = Pipeline(
        ArraySource({"x": rows}), batch_size=4, epochs=1, last="pad", shuffle=False, pad=pads
    )
    last = data.batch(1)
    np.testing.assert_array_equal(last["length"], [2, 0, 0, 0])
    np.testing.assert_array_equal(last["x"][1:], 0)
    np.testing.assert_array_equal(last["mask"], [1, 0, 0, 0])
    assert stack_objects(last["x"]).shape == (4, 4)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_padded_batches_of_a_pipeline(shards):
    """The parts of all processes are those of one, and stacked batches those of single steps."""
    whole = make_pipeline(8, shuffle=True, seed=3)
    parts = [
        make_pipeline(8, shuffle=True, seed=3, shard_index=index, shard_count=shards)
        for index in range(shards)
    ]
    assert whole.steps == 5
    assert whole.is_uniform
    seen = []
    for step in range(5):
        batch = whole.batch(step)
        for name, array in batch.items():
            np.testing.assert_array_equal(
                array, np.concatenate([part.batch(step)[name] for part in parts])
            )
        np.testing.assert_array_equal(batch["mask"], whole.mask(step))
        kept = batch["mask"] > 0
        assert not batch["x"][~kept].any()
        seen += batch["x"][kept].tolist()
    assert sorted(seen) == sorted(ARRAYS["x"].tolist())
    stacked = whole.batches(3, 2)
    np.testing.assert_array_equal(stacked["mask"][1], whole.batch(4)["mask"])
    np.testing.assert_array_equal(stacked["x"][1], whole.batch(4)["x"])


@pytest.mark.parametrize("fuse", [1, 4])
def test_a_run_trains_on_padded_batches(fuse):
    """The last step has five examples, and its loss is the mean over them."""
    losses = []

    class Watch(ftrain.Hook):
        def begin(self, report):
            report.listen(metrics=lambda metrics: losses.extend(metrics.column("loss").tolist()))

    def loss_fn(params, batch, rng):
        return WeightedMean.of(predict(params, batch)["loss"], batch["mask"])

    ftrain.train(
        loss_fn,
        PARAMS,
        make_pipeline(8),
        optimizer=ftrain.optimizers.gradient_descent(0.0),
        hooks=[Watch(), ftrain.hooks.Logging(write=lambda line: None)],
        fuse=fuse,
    )
    expected = [LOSSES[at : at + 8].mean() for at in range(0, 37, 8)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
