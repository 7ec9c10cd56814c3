import ml_dtypes
import numpy as np
import pytest

from ftrain.formats.examples.features import Fixed, Image, Padded, Ragged, Raw, SpecError, Steps
from ftrain.formats.examples.messages import encode_example, encode_sequence_example
from ftrain.formats.examples.parsing import ExampleParser, parse_examples, parse_sequence_examples

COUNTS = [3, 40]  # parsed one by one, and in lock-step


def batch(count, make):
    return [encode_example(make(number)) for number in range(count)]


@pytest.fixture(params=COUNTS)
def count(request):
    return request.param


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "bfloat16", np.float32, np.dtype(">f4")]
)
def test_floats_of_one_shape(count, dtype):
    arrays = parse_examples(
        batch(count, lambda n: {"x": np.arange(6.0) + n}), {"x": Fixed((2, 3), dtype)}
    )
    wanted = np.arange(6.0).reshape(2, 3) + np.arange(count)[:, None, None]
    assert arrays["x"].dtype == np.dtype(getattr(ml_dtypes, str(dtype), dtype)).newbyteorder("=")
    assert arrays["x"].flags.writeable
    np.testing.assert_array_equal(arrays["x"].astype(float), wanted)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64", "int4"])
def test_integers_of_one_shape(count, dtype):
    arrays = parse_examples(batch(count, lambda n: {"x": [n % 8, 7]}), {"x": Fixed((2,), dtype)})
    np.testing.assert_array_equal(arrays["x"].astype(int), [[n % 8, 7] for n in range(count)])


def test_scalars_bools_and_bytes(count):
    records = batch(count, lambda n: {"b": n % 2, "s": b"a\0" * (n % 4), "two": [b"x", b"%d" % n]})
    spec = {"b": Fixed((), bool), "s": Fixed((), bytes), "two": Fixed((2,), "bytes")}
    arrays = parse_examples(records, spec)
    assert arrays["b"].tolist() == [n % 2 == 1 for n in range(count)]
    assert arrays["s"].tolist() == [b"a\0" * (n % 4) for n in range(count)]
    assert arrays["two"].tolist() == [[b"x", b"%d" % n] for n in range(count)]


@pytest.mark.parametrize("number", [0, 1, -1, 127, 128, 2**35, 2**56, 2**63 - 1, -(2**63)])
def test_integers_of_any_size(count, number):
    records = batch(count, lambda n: {"x": number, "y": [number] * 3, "z": [number, n]})
    arrays = parse_examples(
        records, {"x": Fixed((), "int64"), "y": Fixed((3,), "int64"), "z": Fixed((2,), "int64")}
    )
    assert (arrays["x"] == number).all()
    assert (arrays["y"] == number).all()
    assert arrays["z"].tolist() == [[number, n] for n in range(count)]


@pytest.mark.parametrize("missing", [{}, {"x": None}], ids=["absent", "no list"])
@pytest.mark.parametrize("default", [0.5, [1.5, 2.5]], ids=str)
def test_a_default_stands_for_what_is_missing(count, missing, default):
    records = batch(count, lambda n: missing if n % 2 else {"x": [n, n + 0.5]})
    found = parse_examples(records, {"x": Fixed((2,), "float32", default)})["x"]
    wanted = [np.broadcast_to(default, 2) if n % 2 else [n, n + 0.5] for n in range(count)]
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(
        SpecError,
        match=r"record 1: feature x has no values, expected 2 \(shape \(2,\)\); .*default",
    ):
        parse_examples(records, {"x": Fixed((2,))})


def test_an_empty_list_is_not_a_missing_one(count):
    records = batch(count, lambda n: {"x": np.array([], np.float32)})
    with pytest.raises(
        SpecError, match=r"record 0: feature x has 0 values, expected 2 \(shape \(2,\)\)"
    ):
        parse_examples(records, {"x": Fixed((2,), default=0.5)})


def test_padded(count):
    records = batch(
        count, lambda n: {"x": np.arange(n % 3), "s": None if n % 3 == 0 else [b"s"] * (n % 3)}
    )
    spec = {"x": Padded("int32", pad=-1, lengths="x_size"), "s": Padded("bytes", length=3)}
    arrays = parse_examples(records, spec)
    assert arrays["x"].tolist() == [[[-1, -1], [0, -1], [0, 1]][n % 3] for n in range(count)]
    assert arrays["x"].dtype == np.int32
    assert arrays["x_size"].tolist() == [n % 3 for n in range(count)]
    assert arrays["x_size"].dtype == np.int32
    assert arrays["s"].tolist() == [[b"s"] * (n % 3) + [b""] * (3 - n % 3) for n in range(count)]


def test_padded_cuts_what_is_too_long_only_if_asked(count):
    records = batch(count, lambda n: {"x": np.arange(n % 3, dtype=float)})
    arrays = parse_examples(
        records, {"x": Padded("float32", length=1, truncate=True, lengths="size")}
    )
    assert arrays["x"].tolist() == [[0.0]] * count
    assert arrays["size"].tolist() == [min(n % 3, 1) for n in range(count)]
    with pytest.raises(
        SpecError,
        match=r"record 2: feature x has 2 values, expected at most 1; Padded\(truncate=True\)",
    ):
        parse_examples(records, {"x": Padded("float32", length=1)})


def test_ragged(count):
    records = batch(count, lambda n: {"x": np.arange(n % 3), "s": [b"s"] * (n % 3 + 1)})
    arrays = parse_examples(records, {"x": Ragged("int16", lengths="size"), "s": Ragged("bytes")})
    assert [values.tolist() for values in arrays["x"]] == [[0, 1][: n % 3] for n in range(count)]
    assert arrays["x"][0].dtype == np.int16
    assert arrays["size"].tolist() == [n % 3 for n in range(count)]
    assert [values.tolist() for values in arrays["s"]] == [
        [b"s"] * (n % 3 + 1) for n in range(count)
    ]
    flat = parse_examples(records, {"x": Ragged("int16", flat=True, lengths="size")})
    assert flat["x"].tolist() == [value for n in range(count) for value in range(n % 3)]
    assert flat["size"].tolist() == [n % 3 for n in range(count)]


def test_ragged_arrays_of_one_size_stay_apart(count):
    arrays = parse_examples(batch(count, lambda n: {"x": [n, n]}), {"x": Ragged()})
    assert arrays["x"].shape == (count,)
    assert arrays["x"][2].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", ["uint8", "<i2", "float32", "bfloat16", "bool"])
def test_raw(count, dtype):
    resolved = np.dtype(getattr(ml_dtypes, dtype, dtype))
    wanted = (np.arange(count * 4).reshape(count, 2, 2) % 2).astype(resolved)
    arrays = parse_examples(
        batch(count, lambda n: {"x": wanted[n].tobytes()}), {"x": Raw((2, 2), dtype)}
    )
    assert arrays["x"].dtype == resolved
    assert arrays["x"].flags.writeable
    np.testing.assert_array_equal(arrays["x"].astype(float), wanted.astype(float))
    with pytest.raises(
        SpecError, match=r"record 0: feature x has \d+ bytes, expected \d+ \(shape \(3, 2\) of"
    ):
        parse_examples(
            batch(count, lambda n: {"x": wanted[n].tobytes()}), {"x": Raw((3, 2), dtype)}
        )


@pytest.mark.parametrize("spec", [Fixed((), "int64"), Padded("int64"), Ragged("int64")], ids=str)
@pytest.mark.parametrize("value", [1.5, b"a", np.array([], np.float32)], ids=str)
def test_another_kind_is_an_error_that_names_feature_and_record(count, spec, value):
    records = batch(count, lambda n: {"x": value if n == 2 else 1})
    with pytest.raises(
        SpecError, match=r"part-1: record 2: feature x has (floats|bytes), expected integers; "
    ):
        parse_examples(records, {"x": spec}, where=lambda n: f"part-1: record {n}")


def test_a_wrong_number_of_values_is_an_error(count):
    with pytest.raises(
        SpecError,
        match=r"record 1: feature x has 2 values, expected 1 \(shape \(\)\); Padded and Ragged",
    ):
        parse_examples(batch(count, lambda n: {"x": [n] * (1 + n % 2)}), {"x": Fixed((), "int64")})
    with pytest.raises(
        SpecError, match=r"record 0: feature x has 2 values, but Raw expects one bytes value"
    ):
        parse_examples(batch(count, lambda n: {"x": [b"a", b"b"]}), {"x": Raw((1,))})
    with pytest.raises(
        SpecError, match=r"record 0: feature x has no values, but Image expects one bytes value"
    ):
        parse_examples(batch(count, lambda n: {}), {"x": Image((1, 1, 1))})


@pytest.mark.parametrize(
    ("dtype", "value", "limits"),
    [
        ("uint8", 256, "0 to 255"),
        ("uint8", -1, "0 to 255"),
        ("bool", 2, "0 to 1"),
        ("uint64", -1, "0 to"),
        ("int4", 8, "-8 to 7"),
    ],
)
def test_an_integer_out_of_range_is_an_error(count, dtype, value, limits):
    records = batch(count, lambda n: {"x": [1, value] if n == 2 else np.zeros(n % 2, int)})
    with pytest.raises(
        SpecError,
        match=rf"record 2: feature x has the value {value}, expected {limits}.*wider dtype",
    ):
        parse_examples(records, {"x": Ragged(dtype)})


def test_a_float_out_of_range_is_infinite(count):
    arrays = parse_examples(batch(count, lambda n: {"x": 1e30}), {"x": Fixed((), "float16")})
    assert np.isinf(arrays["x"]).all()


def test_no_records():
    arrays = parse_examples(
        [],
        {"x": Fixed((2,)), "p": Padded(), "r": Ragged(), "raw": Raw((3,)), "i": Image((1, 2, 3))},
    )
    assert {name: array.shape for name, array in arrays.items()} == {
        "x": (0, 2),
        "p": (0, 0),
        "r": (0,),
        "raw": (0, 3),
        "i": (0, 1, 2, 3),
    }


def test_empty_shapes(count):
    arrays = parse_examples(
        batch(count, lambda n: {"x": np.array([], np.float32)}), {"x": Fixed((0, 2))}
    )
    assert arrays["x"].shape == (count, 0, 2)


def test_features_that_are_not_wanted_are_passed_over(count):
    records = batch(
        count, lambda n: {"x": n, f"extra-{n % 3}": [b"a"] * (n + 1), "more": np.arange(100)}
    )
    assert parse_examples(records, {"x": Fixed((), "int64")})["x"].tolist() == list(range(count))
    assert parse_examples(records, {}) == {}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Fixed((2,), "complex64"), TypeError, r"dtype is 'complex64', expected floats"),
        (lambda: Fixed((2,), "nonsense"), TypeError, r"dtype is 'nonsense'"),
        (lambda: Fixed((-1,)), ValueError, r"shape is \(-1,\), expected a tuple"),
        (lambda: Fixed(3), ValueError, r"shape is 3, expected a tuple"),
        (
            lambda: Fixed((2,), default=[1, 2, 3]),
            ValueError,
            r"default has shape \(3,\), expected one value or shape",
        ),
        (
            lambda: Fixed((), "uint8", 256),
            ValueError,
            r"default is 256, which is not a value of dtype uint8",
        ),
        (
            lambda: Fixed((), "bytes", "a"),
            ValueError,
            r"default is 'a', which is not a value of dtype bytes",
        ),
        (lambda: Padded("int64", pad=0.5), ValueError, r"pad is 0.5"),
        (
            lambda: Padded("int64", pad=[1, 2]),
            ValueError,
            r"pad is \[1, 2\], expected a single value",
        ),
        (lambda: Padded(length=-1), ValueError, r"length is -1"),
        (lambda: Padded(truncate=True), ValueError, r"truncate=True needs a length"),
        (lambda: Ragged(flat=True), ValueError, r"name them with lengths"),
        (lambda: Raw((2,), "bytes"), TypeError, r"Raw holds numbers"),
        (
            lambda: Image((2, 2, 2)),
            ValueError,
            r"must be .* with 1, 3 or 4 channels .*, got \(2, 2, 2\)",
        ),
        (lambda: Image((10**5, 10**5, 3)), ValueError, r"at most \d+ pixels, got"),
        (lambda: Steps(Ragged()), TypeError, r"expected a Fixed"),
        (
            lambda: ExampleParser({"x": "float32"}),
            TypeError,
            r"spec of feature 'x' is 'float32', expected",
        ),
        (
            lambda: ExampleParser({"x": Padded(lengths="y"), "y": Fixed()}),
            ValueError,
            r"two arrays .* named 'y'",
        ),
        (lambda: ExampleParser({"x": Padded(lengths="x")}), ValueError, r"two arrays .* named 'x'"),
    ],
)
def test_a_spec_is_checked_when_it_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_steps():
    records = [
        encode_sequence_example({"id": n}, {"x": [[n, t] for t in range(n)]}) for n in range(4)
    ]
    context, lists = parse_sequence_examples(
        records,
        {"id": Fixed((), "int32")},
        {"x": Steps(Fixed((2,), "int64"), pad=-1, lengths="count")},
    )
    assert context["id"].tolist() == [0, 1, 2, 3]
    assert lists["x"].shape == (4, 3, 2)
    assert lists["x"][2].tolist() == [[2, 0], [2, 1], [-1, -1]]
    assert lists["count"].tolist() == [0, 1, 2, 3]
    assert lists["count"].dtype == np.int32
    _, lists = parse_sequence_examples(
        records, {}, {"x": Steps(Fixed((2,), "int64"), length=2, truncate=True)}
    )
    assert lists["x"][3].tolist() == [[3, 0], [3, 1]]
    with pytest.raises(
        SpecError,
        match=r"record 3: feature list x has 3 steps, expected at most 2; Steps\(truncate",
    ):
        parse_sequence_examples(records, {}, {"x": Steps(Fixed((2,), "int64"), length=2)})


def test_fixed_steps_are_short_for_steps_with_lengths():
    records = [
        encode_sequence_example({}, {"w": [b"a"] * n, "f": [float(n)] * n}) for n in range(3)
    ]
    _, lists = parse_sequence_examples(
        records, {}, {"w": Fixed((), "bytes"), "f": Fixed((), default=7.0), "no": Fixed()}
    )
    assert lists["w"].tolist() == [[b"", b""], [b"a", b""], [b"a", b"a"]]
    assert lists["f"].tolist() == [[7, 7], [1, 7], [2, 2]]
    assert lists["w_length"].tolist() == [0, 1, 2]
    assert lists["no"].shape == (3, 0)
    assert lists["no_length"].tolist() == [0, 0, 0]


def test_ragged_steps():
    records = [
        encode_sequence_example({}, {"x": [np.arange(t) for t in range(n)]}) for n in range(3)
    ]
    _, lists = parse_sequence_examples(records, {}, {"x": Ragged("int32", lengths="count")})
    assert [[step.tolist() for step in steps] for steps in lists["x"]] == [[], [[]], [[], [0]]]
    assert lists["x"][2][1].dtype == np.int32
    assert lists["count"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"x": [[1.5], [1.5, 2.5]]}, r"part: record 1: step 1: feature x has 2 values, expected 1"),
        ({"x": [1.5, 1.5, None]}, r"part: record 1: step 2: feature x has no values"),
        ({"x": [1]}, r"part: record 1: step 0: feature x has integers, expected floats"),
    ],
)
def test_errors_of_steps_name_them(lists, message):
    records = [encode_sequence_example({}, {"x": [0.5]}), encode_sequence_example({}, lists)]
    with pytest.raises(SpecError, match=message):
        parse_sequence_examples(records, {}, {"x": Fixed()}, where=lambda n: f"part: record {n}")


def test_other_bytes_are_no_sequence_example():
    with pytest.raises(SpecError, match=r"record 0: its 3 bytes are not a valid SequenceExample"):
        parse_sequence_examples([b"abc"], {}, {"x": Fixed()})
