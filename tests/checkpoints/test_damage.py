"""Damage of every kind to real files: it is detected, or it changes nothing."""

import json
import random
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from ftrain.checkpoints import CheckpointError, CheckpointManager, DamagedError, open_reader, verify
from ftrain.checkpoints.manifest import crc32c_of, format_manifest
from ftrain.checkpoints.orbax_layout import leaf_specs
from ftrain.checkpoints.restore import LARGE


def tree(value: float = 1.0):
    rng = np.random.default_rng(int(value))
    return {
        "w": jnp.asarray(rng.standard_normal((300, 40)), jnp.float32),
        "half": jnp.asarray(rng.standard_normal(77), jnp.bfloat16),
        "nested": [jnp.arange(5), jnp.zeros((0, 3)), {"flag": jnp.array(True)}],
        "rng": jax.random.key(int(value)),
    }


def values(tree) -> list[np.ndarray]:
    return [
        np.asarray(jax.random.key_data(leaf) if leaf.dtype.name.startswith("key") else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def is_same(left, right) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(values(left), values(right), strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with CheckpointManager(directory) as manager:
        manager.save(1, tree(1.0))
        manager.save(2, tree(2.0))
    return directory


@pytest.fixture
def directory(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice([path for path in files if path.stat().st_size])
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng: random.Random, files: list[Path]) -> None:
    path = rng.choice([path for path in files if path.stat().st_size])
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def delete(rng: random.Random, files: list[Path]) -> None:
    rng.choice(files).unlink()


def swap(rng: random.Random, files: list[Path]) -> None:
    one, other = rng.sample(files, 2)
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


def grow(rng: random.Random, files: list[Path]) -> None:
    with open(rng.choice(files), "ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 50)))


def add(rng: random.Random, files: list[Path]) -> None:
    (rng.choice(files).parent / f"extra{rng.randrange(9)}").write_bytes(b"more")


DAMAGES = [flip, truncate, delete, swap, grow, add]


any_damage = given(
    seed=st.integers(0, 2**32), damage=st.sampled_from(DAMAGES), everywhere=st.booleans()
)
one_copy_after_the_other = [HealthCheck.function_scoped_fixture]


@settings(max_examples=50, deadline=None, suppress_health_check=one_copy_after_the_other)
@any_damage
def test_damage_is_found_or_harmless(saved, tmp_path, seed, damage, everywhere):
    check_damage(saved, tmp_path, seed, damage, everywhere)


@pytest.mark.campaign
@settings(max_examples=500, deadline=None, suppress_health_check=one_copy_after_the_other)
@any_damage
def test_500_damages_are_found_or_harmless(saved, tmp_path, seed, damage, everywhere):
    check_damage(saved, tmp_path, seed, damage, everywhere)


def test_a_wrong_digit_in_the_catalog_does_not_take_a_run_back(saved, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(saved, directory)
    path = directory / "checkpoints.json"
    catalog = json.loads(path.read_text())
    newest = f"{catalog['checkpoints'][-1]['time']}"
    path.write_text(path.read_text().replace(newest, f"0{newest[1:]}".lstrip("0") or "1"))
    assert path.read_text() != (saved / "checkpoints.json").read_text()
    assert CheckpointManager(directory).latest() == 2
    assert is_same(CheckpointManager(directory).restore(like=tree()), tree(2.0))


def check_damage(saved, tmp_path, seed, damage, everywhere):
    """Damage one or both of two checkpoints: what is restored is what was saved."""
    directory = tmp_path / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(saved, directory)
    damage(random.Random(seed), files_of(directory if everywhere else directory / "2"))
    bad = [
        step for step in (2, 1) if contents(directory / f"{step}") != contents(saved / f"{step}")
    ]
    for step in (2, 1):
        assert bool(verify(directory / f"{step}")) == (step in bad), (
            "every byte of a checkpoint counts, and no other"
        )
    if bad == [2, 1]:
        with pytest.raises(DamagedError):
            CheckpointManager(directory).restore(like=tree(), step=2)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restored = CheckpointManager(directory).restore(like=tree())
    fell_back = is_same(restored, tree(1.0))
    assert fell_back or is_same(restored, tree(2.0))
    assert fell_back == any("resuming from step 1" in str(each.message) for each in told)
    assert not fell_back or bad == [2]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in files_of(directory)
    }


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_one_leaf_is_read_right_or_not_at_all(directory, damage):
    wanted = np.asarray(tree(2.0)["w"])
    for seed in range(10):
        copy = Path(shutil.copytree(directory / "2", directory.parent / f"copy{seed}"))
        damage(random.Random(seed), files_of(copy))
        try:
            found = open_reader(copy).read("w")
        except ValueError:
            continue
        np.testing.assert_array_equal(found, wanted)


def damage_a_leaf(path: Path, value: np.ndarray) -> Path:
    """Change one byte of a leaf's values, wherever they are."""
    for file in files_of(path):
        data = file.read_bytes()
        if (at := data.find(value.tobytes()[:64])) >= 0:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            return file
    raise AssertionError("the leaf is nowhere")


def test_a_flipped_byte_is_told_by_file_and_by_leaf(directory):
    file = damage_a_leaf(directory / "2", np.asarray(tree(2.0)["w"]))
    name = file.relative_to(directory / "2").as_posix()
    damage = verify(directory / "2")
    assert any(each.startswith(f"file {name} has crc32c ") for each in damage)
    assert "leaf w has other values than were saved" in damage
    assert len(damage) == 2
    with pytest.raises(DamagedError, match="leaf w has other values than were saved") as caught:
        CheckpointManager(directory).restore(like=tree(), step=2)
    assert f"file {name} has crc32c" in str(caught.value)


@pytest.mark.parametrize(
    "elements", [1_000_000, 260_000]
)  # verified in the background, or while it is read
def test_damage_of_a_large_file_is_found_through_its_values(tmp_path, elements):
    """Restoring does not read large files twice, for their checksums."""
    large = {f"{n}": np.random.default_rng(n).random(elements).astype(np.float32) for n in range(8)}
    CheckpointManager(tmp_path).save(1, large)
    # Orbax does not fix which leaves share a file; the largest file has at least two small ones.
    largest = max((tmp_path / "1").rglob("d/*"), key=lambda path: path.stat().st_size)
    leaf = next(name for name, array in large.items() if array.tobytes() in largest.read_bytes())
    file = damage_a_leaf(tmp_path / "1", large[leaf])
    assert file == largest
    assert file.stat().st_size > LARGE
    with pytest.raises(
        DamagedError, match=f"leaf {leaf} has other values than were saved"
    ) as caught:
        CheckpointManager(tmp_path).restore(like=large)
    assert f"file {file.relative_to(tmp_path / '1')} has crc32c" in str(caught.value)
    assert len(caught.value.damage) == 2


def test_the_warning_says_what_was_lost(directory):
    (directory / "2" / "commit_success.txt").unlink()
    with pytest.warns(
        UserWarning, match="2 is damaged: file commit_success.txt is missing"
    ) as told:
        restored = CheckpointManager(directory).restore(like=tree())
    assert is_same(restored, tree(1.0))
    assert "resuming from step 1: the 1 steps after it are lost" in str(told[0].message)


def test_when_all_are_damaged_the_newest_is_told(directory):
    for step in ("1", "2"):
        (directory / step / "manifest.json").unlink()
    with pytest.raises(DamagedError, match=r"2 is damaged: file manifest.json is missing"):
        CheckpointManager(directory).restore(like=tree())


def test_a_run_goes_on_where_a_damaged_checkpoint_stood(directory):
    (directory / "2" / "state" / "_METADATA").write_text("{}")
    manager = CheckpointManager(directory)
    with pytest.warns(UserWarning, match="2 is damaged"):
        manager.restore(like=tree())
    assert manager.steps() == [1]
    assert manager.latest() == 1
    manager.save(2, tree(3.0))
    assert is_same(manager.restore(like=tree()), tree(3.0))
    assert (directory / "2.damaged").is_dir()


def test_a_damaged_checkpoint_drives_out_no_good_one(directory):
    (directory / "2" / "commit_success.txt").write_text("")
    manager = CheckpointManager(directory, keep=2)
    with pytest.warns(UserWarning, match="2 is damaged"):
        manager.restore(like=tree())
    manager.save(3, tree(3.0))
    assert manager.steps() == [1, 3]
    assert (directory / "2.damaged").is_dir()


def test_two_whole_checkpoints_that_changed_places_are_found(directory):
    (directory / "1").rename(directory / "x")
    (directory / "2").rename(directory / "1")
    (directory / "x").rename(directory / "2")
    assert verify(directory / "1") == ["file manifest.json is of step 2"]


@pytest.mark.parametrize("name", ["../2/secret", "/etc/passwd", "state/../../x", ""])
def test_a_manifest_cannot_lead_out_of_its_directory(directory, name):
    rewrite_manifest(
        directory / "2",
        lambda manifest: manifest["files"].update({name: {"size": 1, "crc32c": "0"}}),
    )
    with pytest.raises(DamagedError, match=r"file manifest.json: .*is not inside the checkpoint"):
        CheckpointManager(directory).restore(like=tree(), step=2)


@pytest.mark.parametrize("shape", [[2**62, 2**62], [-1], ["x"], [1] * 100, [1.5]])
def test_an_absurd_shape_is_refused_before_memory_is_spent(directory, shape):
    rewrite_manifest(
        directory / "2", lambda manifest: manifest["leaves"]["w"].update({"shape": shape})
    )
    with pytest.raises(DamagedError, match=r"file manifest.json: "):
        open_reader(directory / "2")


def test_a_leaf_larger_than_the_machine_is_refused(directory):
    """Manifest and zarr metadata both declare a petabyte: nothing is allocated for it."""
    huge = {"shape": [2**47], "pieces": {f"0:{2**47}": "0"}}
    rewrite_manifest(directory / "2", lambda manifest: manifest["leaves"]["w"].update(huge))
    with pytest.raises(
        DamagedError, match=r"leaf w is float32\[300, 40\], expected float32\[140737488355328\]"
    ):
        open_reader(directory / "2").read("w")


def declare(path: Path, key: str, shape: list[int]) -> None:
    """Have the zarr metadata of leaf w declare another shape, of the leaf or of its chunks."""
    store = ts.KvStore.open(leaf_specs(path)["w"]["kvstore"]).result()
    metadata = json.loads(store[b"zarr.json"])
    if key == "shape":
        metadata["shape"] = shape
    else:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = shape
        for codec in metadata["codecs"]:
            if "chunk_shape" in codec["configuration"]:
                codec["configuration"]["chunk_shape"] = shape
    store[b"zarr.json"] = json.dumps(metadata).encode()


@pytest.mark.parametrize("key", ["shape", "chunk_shape"])
@pytest.mark.parametrize("has_manifest", [True, False], ids=["ftrain's", "plain Orbax's"])
def test_a_restore_of_an_absurd_shape_is_refused_before_memory_is_spent(
    tmp_path, key, has_manifest
):
    """Without a guard, tensorstore ends the process: std::bad_alloc."""
    path = tmp_path / "1"
    shape = [2**40, 40]
    if has_manifest:
        CheckpointManager(tmp_path).save(1, {"w": jnp.ones((300, 40))})
    else:
        ocp.save(str(path), {"w": jnp.ones((300, 40))})
    declare(path, key, shape)
    if has_manifest:
        leaf = (
            {"shape": shape, "pieces": {f"0:{shape[0]},0:{shape[1]}": "0"}}
            if key == "shape"
            else {}
        )

        def forge(manifest):
            manifest["leaves"]["w"].update(leaf)
            names = [file for file in files_of(path) if file.name != "manifest.json"]
            sizes = {file.relative_to(path).as_posix(): file.stat().st_size for file in names}
            manifest["files"] = {
                name: {"size": size, "crc32c": crc32c_of(path / name)}
                for name, size in sizes.items()
            }

        rewrite_manifest(path, forge)
    like = {"w": jax.ShapeDtypeStruct(tuple(shape) if key == "shape" else (300, 40), jnp.float32)}
    told = (
        r"leaf w cannot be read: .* would have 175921860444160 bytes, "
        r"expected at most \d+ \(the memory of"
    )
    with pytest.raises(DamagedError, match=told):
        CheckpointManager(tmp_path).restore(like=like, step=1)
    with pytest.raises(DamagedError, match=told):
        open_reader(path).read("w")


@pytest.mark.parametrize(
    ("limit", "error", "told"),
    [
        (
            "4095",
            DamagedError,
            r"leaf w cannot be read: it would have 4096 bytes, expected at most 4095 \(FTRAIN_MAX_",
        ),
        (
            "4 GB",
            CheckpointError,
            r"FTRAIN_MAX_LEAF_BYTES is '4 GB', expected an integer > 0 \(bytes\)",
        ),
        ("0", CheckpointError, "FTRAIN_MAX_LEAF_BYTES is '0'"),
    ],
)
def test_the_limit_of_a_leaf_can_be_set(tmp_path, monkeypatch, limit, error, told):
    """A leaf of zeros can declare any size, as Orbax need not store its bytes."""
    CheckpointManager(tmp_path).save(1, {"w": jnp.ones((32, 32))})
    monkeypatch.setenv("FTRAIN_MAX_LEAF_BYTES", "4096")
    assert open_reader(tmp_path / "1").read("w").shape == (32, 32)
    monkeypatch.setenv("FTRAIN_MAX_LEAF_BYTES", limit)
    with pytest.raises(error, match=told):
        open_reader(tmp_path / "1").read("w")


@pytest.mark.parametrize(
    "contents", ["", "[]", "{", '{"manifest": {}, "crc32c": ""}', "[" * 100_000, "\x00\xff"]
)
def test_a_manifest_that_is_none_is_refused(directory, contents):
    (directory / "2" / "manifest.json").write_text(contents)
    with pytest.raises(DamagedError, match=r"file manifest.json: "):
        open_reader(directory / "2")


def rewrite_manifest(path: Path, change) -> None:
    """A forged manifest with a valid checksum."""
    contents = json.loads((path / "manifest.json").read_text())["manifest"]
    change(contents)
    (path / "manifest.json").write_text(format_manifest(contents))


@pytest.mark.parametrize("use_zarr3", [False, True])
def test_a_lost_chunk_of_a_plain_orbax_checkpoint_is_damage(tmp_path, use_zarr3):
    """Orbax stores zeros too, so a missing chunk is damage.

    Older versions stored no zeros; for those, it is not reported.
    """
    home = tmp_path / "plain"
    handler = orbax.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=use_zarr3)
    with orbax.Checkpointer(handler) as saver:
        saver.save(home, {"w": jnp.arange(12.0).reshape(3, 4), "zeros": jnp.zeros(5)})
    assert verify(home) == []
    chunk = home / "w" / ("c/0/0" if use_zarr3 else "0.0")
    chunk.unlink()
    assert verify(home) == ["leaf w cannot be read: its data are missing"]
    with pytest.raises(DamagedError, match="leaf w cannot be read: its data are missing"):
        open_reader(home).read("w")
    metadata = json.loads((home / "_METADATA").read_text())
    (home / "_METADATA").write_text(
        json.dumps(metadata | {"store_array_data_equal_to_fill_value": False})
    )
    np.testing.assert_array_equal(open_reader(home).read("w"), np.zeros((3, 4)))
