"""The ready metrics against scikit-learn: weights, splits into batches, orders of merging."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk

import ftrain.metrics as metrics
from ftrain import WeightedMean
from ftrain.metrics.metric import check_metrics

SPLITS = {"one": [60], "even": [20] * 3, "uneven": [1, 30, 0, 29], "each": [1] * 60}
SEEDS = [0, 1]


def classes_of(seed: int, classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=60)
    logits = rng.normal(size=(60, classes)) + 1.5 * np.eye(classes)[labels]
    return {
        "logits": logits.astype(np.float32),
        "label": labels.astype(np.int32),
        "weight": rng.uniform(0.1, 3, 60).astype(np.float32),
    }


def measured(metric: metrics.Metric, values, split="uneven", mask=None, seed=0, padding=2):
    """The metric over batches, each padded with NaN, merged in a random order."""
    mask = np.ones(60, np.float32) if mask is None else mask
    update = jax.jit(metric.update)
    parts = []
    start = 0
    for size in SPLITS[split]:
        rows = slice(start, start + size)
        start += size
        batch = {name: _pad(value[rows], padding) for name, value in values.items()}
        weights = np.concatenate([mask[rows], np.zeros(padding, np.float32)])
        part = update(metric.init(), batch, weights)
        parts.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), part))
    order = np.random.default_rng(seed).permutation(len(parts))
    return metric.compute(functools.reduce(metric.merge, [parts[at] for at in order]))


def _pad(array, rows):
    value = np.nan if array.dtype.kind == "f" else 99
    return np.concatenate([array, np.full((rows, *array.shape[1:]), value, array.dtype)])


def predicted(values):
    return np.argmax(values["logits"], axis=-1)


def scored(score, average):
    none_is_a_name = None if average == "none" else average

    def reference(values, weights):
        return score(
            values["label"],
            predicted(values),
            average=none_is_a_name,
            sample_weight=weights,
            zero_division=0,
        )

    return reference


def top(k):
    def reference(values, weights):
        return sk.top_k_accuracy_score(
            values["label"], values["logits"], k=k, sample_weight=weights, labels=range(5)
        )

    return reference


def confusion(normalize):
    def reference(values, weights):
        return sk.confusion_matrix(
            values["label"],
            predicted(values),
            sample_weight=weights,
            labels=range(5),
            normalize=normalize,
        )

    return reference


def log_loss(values, weights):
    logits = values["logits"].astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return sk.log_loss(
        values["label"], shares, sample_weight=weights, labels=np.arange(logits.shape[-1])
    )


REFERENCES = {
    "accuracy": (
        metrics.accuracy,
        lambda values, weights: sk.accuracy_score(
            values["label"], predicted(values), sample_weight=weights
        ),
    ),
    "cross entropy": (metrics.cross_entropy, log_loss),
    "top 2": (functools.partial(metrics.top_k, 2), top(2)),
    "top 3": (functools.partial(metrics.top_k, 3), top(3)),
    "confusion": (metrics.confusion_matrix, confusion(None)),
    "confusion by row": (
        functools.partial(metrics.confusion_matrix, normalize="true"),
        confusion("true"),
    ),
    "confusion by column": (
        functools.partial(metrics.confusion_matrix, normalize="predicted"),
        confusion("pred"),
    ),
    "confusion of all": (
        functools.partial(metrics.confusion_matrix, normalize="all"),
        confusion("all"),
    ),
} | {
    f"{name} {average}": (functools.partial(metric, average), scored(score, average))
    for name, metric, score in (
        ("precision", metrics.precision, sk.precision_score),
        ("recall", metrics.recall, sk.recall_score),
        ("f1", metrics.f1, sk.f1_score),
    )
    for average in ("macro", "micro", "weighted", "none")
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", REFERENCES)
def test_classification_is_that_of_scikit_learn(name, seed):
    make, reference = REFERENCES[name]
    values = classes_of(seed, 5)
    np.testing.assert_allclose(measured(make(), values), reference(values, None), rtol=2e-6)
    weighted = measured(make(weights="weight"), values, "even", seed=seed)
    np.testing.assert_allclose(weighted, reference(values, values["weight"]), rtol=2e-6)
    masked = measured(make(), values, "one", mask=values["weight"])
    np.testing.assert_allclose(masked, reference(values, values["weight"]), rtol=2e-6)


def test_classes_that_do_not_occur_are_no_part_of_a_macro_average():
    values = classes_of(0, 5)
    values["label"] %= 2
    values["logits"][:, 3:] -= 100
    expected = sk.f1_score(values["label"], predicted(values), average="macro", zero_division=0)
    assert measured(metrics.f1(), values) == pytest.approx(expected)


@pytest.mark.parametrize("average", ["binary", "macro"])
@pytest.mark.parametrize("metric", ["precision", "recall", "f1"])
def test_two_classes_by_logits_a_score_a_probability_or_the_class_itself(metric, average):
    values = classes_of(3, 2)
    score = getattr(sk, f"{metric}_score")
    expected = score(values["label"], predicted(values), average=average)
    make = getattr(metrics, metric)
    assert measured(make(average), values) == pytest.approx(expected)
    margin = values["logits"][:, 1] - values["logits"][:, 0]
    one = {"label": values["label"], "logits": margin}
    assert measured(make(average), one) == pytest.approx(expected)
    assert measured(make(average), one | {"logits": margin[:, None]}) == pytest.approx(expected)
    chance = one | {"logits": 1 / (1 + np.exp(-margin))}
    assert measured(make(average, threshold=0.5), chance) == pytest.approx(expected)
    chosen = one | {"logits": predicted(values).astype(np.int32)}
    assert measured(make(average, classes=2), chosen) == pytest.approx(expected)


def auc_cases():
    for seed in range(3):
        values = classes_of(seed, 2)
        margin = values["logits"][:, 1] - values["logits"][:, 0]
        for digits in (None, 1, 0, -1):  # the fewer, the more scores are equal
            rounded = margin if digits is None else np.round(margin, digits)
            yield values | {"logits": rounded}


@pytest.mark.parametrize("values", list(auc_cases()))
@pytest.mark.parametrize("split", SPLITS)
def test_auc_is_that_of_scikit_learn_with_ties_and_weights(values, split):
    expected = sk.roc_auc_score(values["label"], values["logits"])
    assert measured(metrics.auc(), values, split) == pytest.approx(expected, abs=1e-12)
    weighted = sk.roc_auc_score(values["label"], values["logits"], sample_weight=values["weight"])
    found = measured(metrics.auc(weights="weight"), values, split, seed=1)
    assert found == pytest.approx(weighted, rel=1e-7)


def test_auc_of_logits_of_two_classes_of_infinities_and_of_one_class():
    values = classes_of(0, 2)
    margin = values["logits"][:, 1] - values["logits"][:, 0]
    assert measured(metrics.auc(), values) == pytest.approx(
        sk.roc_auc_score(values["label"], margin)
    )
    margin[:10] = np.inf
    margin[10:20] = -np.inf
    finite = np.nan_to_num(margin, posinf=1e9, neginf=-1e9)
    found = measured(metrics.auc(), values | {"logits": margin})
    assert found == pytest.approx(sk.roc_auc_score(values["label"], finite))
    assert np.isnan(measured(metrics.auc(), values | {"label": np.ones(60, np.int32)}))
    assert np.isnan(metrics.auc().compute(metrics.auc().init()))
    margin[3] = np.nan
    assert np.isnan(measured(metrics.auc(), values | {"logits": margin}))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", [(60,), (60, 3)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_r2_is_that_of_scikit_learn(split, shape, offset):
    rng = np.random.default_rng(4)
    labels = (rng.normal(size=shape) + offset).astype(np.float32)
    guesses = (labels + 0.3 * rng.normal(size=shape)).astype(np.float32)
    weight = rng.uniform(0.1, 3, 60).astype(np.float32)
    values = {"label": labels, "prediction": guesses, "weight": weight}
    tolerance = 1e-6 if offset == 0 else 1e-4
    expected = sk.r2_score(labels, guesses)
    assert measured(metrics.r2(), values, split) == pytest.approx(expected, abs=tolerance)
    expected = sk.r2_score(labels, guesses, sample_weight=weight)
    found = measured(metrics.r2(weights="weight"), values, split)
    assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("labels", "guesses", "expected"),
    [([1.0], [1.0], np.nan), ([2.0, 2.0], [2.0, 2.0], 1.0), ([2.0, 2.0], [2.0, 1.0], 0.0)],
)
def test_r2_of_labels_that_do_not_vary(labels, guesses, expected):
    metric = metrics.r2()
    values = {"label": jnp.array(labels), "prediction": jnp.array(guesses)}
    found = metric.compute(metric.update(metric.init(), values, jnp.ones(len(labels))))
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize("split", SPLITS)
def test_means_and_perplexities(split):
    rng = np.random.default_rng(5)
    losses = rng.normal(size=(60, 7)).astype(np.float32)
    tokens = rng.integers(2, size=(60, 7)).astype(np.float32)
    rows = rng.uniform(0, 2, 60).astype(np.float32)
    values = {"loss": losses, "tokens": tokens, "rows": rows}
    assert measured(metrics.mean(), values, split) == pytest.approx(losses.mean(), rel=1e-6)
    expected = np.average(losses, weights=tokens)
    assert measured(metrics.mean(weights="tokens"), values, split) == pytest.approx(expected, 1e-6)
    both = np.average(losses, weights=tokens * rows[:, None])
    found = measured(metrics.mean(weights="tokens"), values, split, mask=rows)
    assert found == pytest.approx(both, 1e-5)
    found = measured(metrics.perplexity(weights="tokens"), values, split)
    assert found == pytest.approx(np.exp(expected), 1e-6)


def test_a_weighted_mean_is_summed_and_weighed():
    metric = metrics.mean("bits")
    parts = [WeightedMean(jnp.array(6.0), jnp.array(2.0)), WeightedMean(jnp.array(1.0), 8.0)]
    total = metric.init()
    for part in parts:
        total = metric.update(total, {"bits": part}, jnp.ones(4))
    assert metric.compute(total) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="has its weights already"):
        metrics.mean("bits", weights="x").update(metric.init(), {"bits": parts[0]}, jnp.ones(4))


def test_tokens_are_classified_like_examples():
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(60, 4, 3)).astype(np.float32)
    labels = rng.integers(3, size=(60, 4)).astype(np.int32)
    weight = rng.integers(2, size=(60, 4)).astype(np.float32)
    values = {"logits": logits, "label": labels, "weight": weight}
    flat = labels.ravel(), np.argmax(logits, -1).ravel()
    f1_score = functools.partial(sk.f1_score, average="macro")
    for make, score in ((metrics.accuracy, sk.accuracy_score), (metrics.f1, f1_score)):
        expected = score(*flat, sample_weight=weight.ravel())
        assert measured(make(weights="weight"), values) == pytest.approx(expected)


def test_a_prediction_from_nan_is_wrong():
    values = {
        "logits": jnp.array([[0.0, jnp.nan], [jnp.nan, 1.0], [0.0, 1.0], [jnp.inf, 1.0]]),
        "label": jnp.array([1, 1, 1, 0]),
    }

    def of(metric):
        return metric.compute(metric.update(metric.init(), values, jnp.ones(4)))

    assert of(metrics.accuracy()) == 0.5
    assert of(metrics.top_k(1)) == 0.5
    np.testing.assert_allclose(of(metrics.recall("none")), [1, 1 / 3])
    np.testing.assert_allclose(of(metrics.precision("none")), [1, 1])
    np.testing.assert_allclose(of(metrics.confusion_matrix()), [[1, 0], [0, 1]])
    loss = {"loss": jnp.array([1.0, jnp.nan, jnp.inf])}
    for mask, expected in (([1, 0, 0], 1.0), ([1, 1, 0], np.nan), ([1, 0, 1], np.inf)):
        metric = metrics.mean()
        total = metric.update(metric.init(), loss, jnp.array(mask, jnp.float32))
        np.testing.assert_equal(metric.compute(total), expected)


def test_nothing_with_a_weight_is_nan():
    values = {name: jnp.asarray(value) for name, value in classes_of(0, 2).items()}
    values |= {"loss": values["weight"], "prediction": values["weight"]}
    numbers = [metrics.accuracy(), metrics.top_k(1), metrics.f1(), metrics.auc(), metrics.r2()]
    for metric in [*numbers, metrics.mean(), metrics.perplexity()]:
        assert np.isnan(metric.compute(metric.update(metric.init(), values, jnp.zeros(60))))


def test_equal_arguments_make_equal_metrics():
    """So that evaluating again does not compile again."""
    assert metrics.accuracy() is metrics.accuracy()
    assert metrics.f1("micro", logits="a") is metrics.f1("micro", logits="a")
    assert metrics.f1() is not metrics.precision()


WRONG = {
    "no entry 'label' to measure; the batch and the outputs have logits": (
        metrics.accuracy(),
        {"logits": jnp.ones((2, 3))},
    ),
    "not one-hot": (metrics.accuracy(), {"logits": jnp.ones((2, 3)), "label": jnp.ones(3)}),
    "they look one-hot": (
        metrics.accuracy(),
        {"logits": jnp.ones((2, 3)), "label": jnp.ones((2, 3))},
    ),
    "expected 2 examples along the first axis": (metrics.mean(), {"loss": jnp.ones(3)}),
    "weights 'w' have shape": (metrics.mean(weights="w"), {"loss": jnp.ones(2), "w": jnp.ones(3)}),
    "k is 5, but 'logits' has 3 classes": (
        metrics.top_k(),
        {"logits": jnp.ones((2, 3)), "label": jnp.ones(2)},
    ),
    "give the number of classes": (
        metrics.f1(),
        {"logits": jnp.ones(2, jnp.int32), "label": jnp.ones(2, jnp.int32)},
    ),
    "auc is of two classes": (
        metrics.auc(),
        {"logits": jnp.ones((2, 3)), "label": jnp.ones(2)},
    ),
    "expected one shape": (
        metrics.r2(),
        {"prediction": jnp.ones((2, 1)), "label": jnp.ones(2)},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_entries_that_do_not_fit(message):
    metric, values = WRONG[message]
    with pytest.raises(ValueError, match=message.replace("(", ".")):
        metric.update(metric.init(), values, jnp.ones(2))


def test_labels_that_are_no_class():
    values = {"logits": jnp.ones((2, 3)), "label": jnp.array([0, -1])}
    for metric in (metrics.f1(), metrics.confusion_matrix()):
        total = metric.update(metric.init(), values, jnp.ones(2))
        with pytest.raises(ValueError, match="labels must be from 0 to 2"):
            metric.compute(total)
        metric.compute(metric.update(metric.init(), values, jnp.array([1.0, 0.0])))
    metric = metrics.auc()
    values = {"logits": jnp.ones(2), "label": jnp.array([0, 2])}
    with pytest.raises(ValueError, match="must be 0 or 1, got 2"):
        metric.compute(metric.update(metric.init(), values, jnp.ones(2)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": lambda values: 0.0}, "sums and weights, not means of batches"),
        ({"x": metrics.accuracy}, r"call it, accuracy\(\)"),
        ([metrics.accuracy()], "metrics must be a dict"),
    ],
)
def test_what_is_no_metric(wrong, message):
    with pytest.raises(TypeError, match=message):
        check_metrics(wrong)
    with pytest.raises(TypeError, match=r"Metric.merge must be a function"):
        metrics.Metric(dict, operator.add, None, float)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="average must be one of"):
        metrics.f1("mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="normalize must be one of"):
        metrics.confusion_matrix(normalize="rows")  # pyright: ignore[reportArgumentType]
