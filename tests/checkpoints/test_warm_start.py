"""warm_start: by regular expressions, from previous names, and along vocabularies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from memory_checkpoint import Memory, empty_params, floats, old_checkpoint, values

from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.vocabulary import VocabInfo
from ftrain.checkpoints.warm_start import warm_start
from ftrain.cluster import make_mesh

params, checkpoint = (
    pytest.fixture(empty_params, name="params"),
    pytest.fixture(old_checkpoint, name="checkpoint"),
)


# Warm starts by regular expression.


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (".*", {"enc/w": [4, 5], "enc/b": [6], "head": [7]}),
        ("enc", {"enc/w": [4, 5], "enc/b": [6], "head": [0]}),
        (".*w", {"enc/w": [4, 5], "enc/b": [0], "head": [0]}),
        (["head", "enc/b$"], {"enc/w": [0, 0], "enc/b": [6], "head": [7]}),
    ],
)
def test_the_leaves_whose_names_begin_with_a_match_are_warm_started(
    params, checkpoint, patterns, expected
):
    assert values(warm_start(params, checkpoint, vars_to_warm_start=patterns)) == expected


def test_without_patterns_everything_is_warm_started(params, checkpoint):
    assert values(warm_start(params, checkpoint)) == {"enc/w": [4, 5], "enc/b": [6], "head": [7]}


def test_a_pattern_that_matches_nothing_is_an_error_with_the_names_there_are(params, checkpoint):
    with pytest.raises(
        CheckpointError, match=r"no leaf matches 'w', 'body'; there are enc/b, enc/w, head$"
    ):
        warm_start(params, checkpoint, vars_to_warm_start=["w", "head", "body"])
    with pytest.raises(CheckpointError, match=r"no leaf matches \[\]"):
        warm_start(params, checkpoint, vars_to_warm_start=[])
    with pytest.raises(
        CheckpointError, match=r"vars_to_warm_start has '\(', which is not a regular expression"
    ):
        warm_start(params, checkpoint, vars_to_warm_start="(")


def test_a_leaf_that_the_checkpoint_lacks_is_an_error_with_the_ways_out(params):
    with pytest.raises(CheckpointError) as raised:
        warm_start(params, Memory(enc__w=floats(1, 2), enc__bias=floats(1), head=floats(1)))
    message = str(raised.value)
    assert message.startswith(
        "runs/old/7 does not fit: leaf enc/b is missing, nearest are enc/w, enc/bias\n"
    )
    assert "vars_to_warm_start" in message
    assert "var_name_to_prev_var_name" in message


def test_leaves_are_read_from_their_previous_names(params, checkpoint):
    found = warm_start(
        params, checkpoint, var_name_to_prev_var_name={"enc/b": "old/b", "head": "old/b"}
    )
    assert values(found) == {"enc/w": [4, 5], "enc/b": [3], "head": [3]}


def test_a_key_that_is_no_leaf_renames_every_leaf_whose_whole_name_it_matches():
    checkpoint = Memory(w__ExponentialMovingAverage=floats(1), w2=floats(2), exact=floats(3))
    params = {"net": {"w": jnp.zeros(1), "w2": jnp.zeros(1), "v": jnp.zeros(1)}}
    renames = {
        r"net/(\w)": r"\1/ExponentialMovingAverage",
        r"net/(?P<rest>.*)": r"\g<rest>",
        "net/v": "exact",
    }
    assert values(warm_start(params, checkpoint, var_name_to_prev_var_name=renames)) == {
        "net/v": [3],  # by its own name, before any expression
        "net/w": [1],  # by the first expression that matches
        "net/w2": [2],
    }


@pytest.mark.parametrize(
    ("renames", "message"),
    [
        ({"enc/v": "old/w"}, "enc/v were not used; enc/v is not a leaf to load, nearest are enc/w"),
        ({"enc/w": "old/w"}, "enc/w were not used; enc/w is not among vars_to_warm_start"),
        ({"x": "y", "head": "old/b", "z": "y"}, "x, z were not used"),
        ({"(": "y"}, r"has '\(', which is not a regular expression"),
        ({"(.*)": r"\2"}, r"has '\(\.\*\)': '.*2': invalid group reference"),
        ({"(.*)": r"\g<other>"}, "unknown group name"),
    ],
)
def test_renames_that_cannot_be_meant_are_errors(params, checkpoint, renames, message):
    with pytest.raises(CheckpointError, match=f"var_name_to_prev_var_name.*{message}"):
        warm_start(params, checkpoint, vars_to_warm_start="head", var_name_to_prev_var_name=renames)


# Vocabularies.


@pytest.fixture
def words():
    return VocabInfo(["c", "a", "new"], 3, num_oov_buckets=1, old_vocab=["a", "b", "c"])


@pytest.fixture
def tables():
    return Memory(
        embedding=floats([1, 1], [2, 2], [3, 3], [9, 9]),
        out=floats([1, 2, 3], [10, 20, 30]),
        bias=floats(5, 6),
    )


def model():
    return {"embedding": jnp.ones((4, 2)), "out": jnp.ones((2, 4)), "bias": jnp.ones(2)}


def test_rows_and_columns_follow_their_words_and_other_leaves_are_read_as_they_are(words, tables):
    infos = {"embedding": words, "out": words._replace(axis=1)}
    assert values(warm_start(model(), tables, var_name_to_vocab_info=infos)) == {
        "embedding": [[3, 3], [1, 1], [0, 0], [0, 0]],
        "out": [[3, 1, 0, 0], [30, 10, 0, 0]],
        "bias": [5, 6],
    }


def test_none_warm_starts_only_what_has_a_vocabulary(words, tables):
    found = warm_start(
        model(), tables, vars_to_warm_start=None, var_name_to_vocab_info={"embedding": words}
    )
    assert values(found) == {**values(model()), "embedding": [[3, 3], [1, 1], [0, 0], [0, 0]]}
    assert tables.reads == ["embedding"]
    with pytest.raises(
        CheckpointError, match="vars_to_warm_start is None, and there is no VocabInfo"
    ):
        warm_start(model(), tables, vars_to_warm_start=None)


def test_a_table_is_read_from_its_previous_name_and_cast_and_placed_like_any_leaf(words, tables):
    rows = NamedSharding(make_mesh(), PartitionSpec("data"))
    params = {"table": jax.device_put(jnp.zeros((4, 2), jnp.bfloat16), rows)}
    found = warm_start(
        params,
        tables,
        var_name_to_vocab_info={"table": words},
        var_name_to_prev_var_name={"table": "embedding"},
    )
    assert found["table"].sharding == rows
    assert found["table"].dtype == jnp.bfloat16
    assert values(found) == {"table": [[3, 3], [1, 1], [0, 0], [0, 0]]}


def test_the_old_size_limits_the_words_that_are_taken_over(words, tables):
    infos = {"embedding": words._replace(old_vocab_size=2)}
    found = warm_start(model(), tables, vars_to_warm_start=None, var_name_to_vocab_info=infos)
    assert values(found)["embedding"] == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_new_rows_are_drawn_for_each_leaf_from_a_key_and_are_the_same_every_time(words, tables):
    info = words._replace(backup_initializer=jax.nn.initializers.normal(1.0))
    params = {"a": jnp.zeros((4, 2)), "b": jnp.zeros((4, 2))}

    def start(**key):
        found = warm_start(
            params,
            tables,
            var_name_to_vocab_info={"a": info, "b": info},
            var_name_to_prev_var_name={".": "embedding"},
            **key,
        )
        return np.asarray(found["a"]), np.asarray(found["b"])

    a, b = start()
    np.testing.assert_array_equal(a[:2], [[3, 3], [1, 1]])
    assert np.unique([a[2:], b[2:]]).size == 8  # no number twice
    np.testing.assert_array_equal(start(), (a, b))
    np.testing.assert_array_equal(start(key=jax.random.key(0)), (a, b))
    other, _ = start(key=jax.random.key(1))
    np.testing.assert_array_equal(other[:2], a[:2])
    assert not np.any(other[2:] == a[2:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_oov_buckets": 2},
            r"does not fit: leaf embedding is \[4, 2\], expected 5 along axis 0",
        ),
        ({"axis": 1}, r"leaf embedding is \[4, 2\], expected 4 along axis 1"),
        ({"new_vocab_size": 4}, "leaf embedding: new_vocab has 3 words, expected 4"),
        ({"old_vocab": ["a", "a"]}, "leaf embedding: old_vocab has 'a' in lines 1 and 2"),
        (
            {"old_vocab": list("abcde")},
            r"leaf embedding is \[4, 2\] in the checkpoint, expected at least 5",
        ),
        (
            {"old_vocab": "/nowhere/words"},
            "leaf embedding: old_vocab /nowhere/words cannot be read",
        ),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_an_error_that_names_the_leaf(
    words, tables, changes, message
):
    infos = {"embedding": words._replace(**changes)}
    with pytest.raises(CheckpointError, match=message):
        warm_start(model(), tables, vars_to_warm_start=None, var_name_to_vocab_info=infos)
    assert tables.reads == []


def test_a_table_of_another_kind_is_not_cast(words):
    checkpoint = Memory(embedding=np.zeros((3, 2), np.int32))
    with pytest.raises(
        CheckpointError, match=r"leaf embedding is int32\[3, 2\], expected float32\[4, 2\]"
    ):
        warm_start(
            model(),
            checkpoint,
            vars_to_warm_start=None,
            var_name_to_vocab_info={"embedding": words},
        )


@pytest.mark.parametrize(
    ("patterns", "name"), [(".*", "embeding"), ("bias", "embedding"), (None, "embeding")]
)
def test_a_vocabulary_of_a_leaf_that_is_not_warm_started_is_an_error(words, tables, patterns, name):
    with pytest.raises(CheckpointError, match=f"var_name_to_vocab_info: {name} were not used"):
        warm_start(
            model(), tables, vars_to_warm_start=patterns, var_name_to_vocab_info={name: words}
        )
