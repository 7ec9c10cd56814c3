"""The table from names of TensorFlow 1 to names of ftrain: every counterpart exists."""

import inspect

import pytest

from ftrain.migration import TABLE, find, resolve


@pytest.mark.parametrize("name", TABLE)
def test_every_counterpart_resolves(name):
    for dotted in TABLE[name].ours:
        assert callable(resolve(dotted)), dotted


@pytest.mark.parametrize(
    "name", [name for name in TABLE if name.endswith("Optimizer") and "experimental" not in name]
)
def test_the_counterpart_of_an_optimizer_takes_a_learning_rate(name):
    # The first takes no learning rate, the second takes an optimizer.
    if name not in ("tf.train.Optimizer", "tf.train.SyncReplicasOptimizer"):
        assert "learning_rate" in inspect.signature(resolve(TABLE[name].ours[0])).parameters


def test_names_are_found_with_and_without_their_modules():
    expected = ("tf.train.AdamOptimizer", TABLE["tf.train.AdamOptimizer"])
    for name in (
        "AdamOptimizer",
        "tf.train.AdamOptimizer",
        "train.AdamOptimizer",
        "tf.compat.v1.train.AdamOptimizer",
        "adam",
    ):
        assert find(name) == expected
    assert find("tf.gradients")[1].ours[0] == "ftrain.gradients.value_and_grad"
    assert find("Optimizer.get_slot")[1].ours == ("ftrain.optimizers.get_slot",)
    with pytest.raises(
        LookupError, match=r"AdanOptimizer is not a name .* did you mean AdamOptimizer"
    ):
        find("AdanOptimizer")


def test_a_dotted_name_that_is_not_there():
    with pytest.raises(AttributeError):
        resolve("ftrain.optimizers.adan")
    with pytest.raises(ModuleNotFoundError):
        resolve("nowhere.at.all")
