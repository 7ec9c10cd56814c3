"""Metrics of clu and flax, with padding, split into batches."""

import operator

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ftrain.metrics as metrics
from ftrain.metrics.metric import check_metrics

pytestmark = pytest.mark.standard_promotion  # the libraries rely on it


def make_values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "logits": rng.normal(size=(20, 4)).astype(np.float32),
        "label": rng.integers(4, size=20).astype(np.int32),
        "loss": rng.normal(size=20).astype(np.float32),
    }


def measured(metric: metrics.Metric, values, size=8):
    """Over batches of a size, the last of which is padded with other values."""
    total = metric.init()
    update = jax.jit(metric.update)
    for start in range(0, 20, size):
        rows = [min(at, 19) for at in range(start, start + size)]
        mask = np.array([at < 20 for at in range(start, start + size)], np.float32)
        batch = {name: np.where(_like(mask, v) > 0, v[rows], 3) for name, v in values.items()}
        batch = {name: array.astype(values[name].dtype) for name, array in batch.items()}
        part = jax.tree.map(np.asarray, update(metric.init(), batch, mask))
        total = metric.merge(total, part)
    return metric.compute(total)


def _like(mask, array):
    return mask.reshape(-1, *[1] * (array.ndim - 1))


def accuracy_of(values):
    return np.mean(np.argmax(values["logits"], -1) == values["label"])


def test_a_metric_of_clu():
    values = make_values()
    metric = metrics.from_clu(clu.metrics.Accuracy, labels="label")
    assert measured(metric, values) == pytest.approx(accuracy_of(values))
    metric = metrics.from_clu(clu.metrics.Average.from_output("loss"))
    assert measured(metric, values) == pytest.approx(values["loss"].mean(), abs=1e-6)
    assert measured(metric, values, 7) == pytest.approx(values["loss"].mean(), abs=1e-6)


def test_a_collection_of_clu():
    @flax.struct.dataclass
    class Both(clu.metrics.Collection):
        accuracy: clu.metrics.Accuracy
        loss: clu.metrics.Average.from_output("loss")  # pyright: ignore[reportInvalidTypeForm]

    values = make_values()
    found = measured(metrics.from_clu(Both, labels="label"), values)
    assert found["accuracy"] == pytest.approx(accuracy_of(values))
    assert found["loss"] == pytest.approx(values["loss"].mean(), abs=1e-6)


def test_clu_collects_with_the_mask():
    values = make_values()
    kind = clu.metrics.CollectingMetric.from_outputs(("loss", "mask"))
    found = measured(metrics.from_clu(kind), values)
    np.testing.assert_array_equal(found["loss"][found["mask"] > 0], values["loss"])


def test_metrics_of_nnx():
    values = make_values()
    own = nnx.metrics.Accuracy()
    assert measured(metrics.from_nnx(own, labels="label"), values) == pytest.approx(
        accuracy_of(values)
    )
    assert int(own.count[...]) == 0  # the object is not changed
    several = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    found = measured(metrics.from_nnx(several, labels="label"), values)
    assert found["accuracy"] == pytest.approx(accuracy_of(values))
    assert found["loss"] == pytest.approx(values["loss"].mean(), abs=1e-6)


class Largest(nnx.metrics.Metric):
    def __init__(self):
        self.value = nnx.metrics.MetricState(jnp.array(-jnp.inf))

    def reset(self):
        self.value[...] = jnp.array(-jnp.inf)

    def update(self, *, loss, mask):
        self.value[...] = jnp.maximum(self.value[...], jnp.max(jnp.where(mask > 0, loss, -jnp.inf)))

    def compute(self):
        return self.value[...]


class WithoutMask(Largest):
    def update(self, *, loss):
        self.value[...] = loss.max()


def test_an_own_metric_of_nnx_says_how_it_merges():
    values = make_values()
    found = measured(metrics.from_nnx(Largest(), merge=np.maximum), values)
    assert found == values["loss"].max()
    with pytest.raises(TypeError, match="cannot merge the parts of Largest"):
        metrics.from_nnx(Largest())
    with pytest.raises(TypeError, match="cannot merge the parts of Welford"):  # it has no mask
        metrics.from_nnx(nnx.metrics.Welford("loss"))
    with pytest.raises(TypeError, match="WithoutMask takes no mask"):
        measured(metrics.from_nnx(WithoutMask(), merge=operator.add), values)


def test_what_is_no_metric_of_the_library():
    with pytest.raises(TypeError, match=r"from_clu takes a class of clu.metrics, got"):
        metrics.from_clu(clu.metrics.Accuracy.empty())
    with pytest.raises(TypeError, match="of the last batch"):
        metrics.from_clu(clu.metrics.LastValue)
    with pytest.raises(TypeError, match="call it"):
        metrics.from_nnx(nnx.metrics.Accuracy)
    with pytest.raises(ValueError, match="no entry 'labl' to measure"):
        measured(metrics.from_clu(clu.metrics.Accuracy, labels="labl"), make_values())
    with pytest.raises(TypeError, match=r"use ftrain.metrics.from_clu"):
        check_metrics({"x": clu.metrics.Accuracy})
    with pytest.raises(TypeError, match=r"use ftrain.metrics.from_nnx"):
        check_metrics({"x": nnx.metrics.Accuracy()})
