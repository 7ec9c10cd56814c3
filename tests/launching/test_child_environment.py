"""How many GPUs a process gets, from variables and device files; no GPU is needed."""

import json

import pytest
from launched import run

from ftrain.launching.child_environment import share_of_gpus


@pytest.mark.parametrize(
    ("visible", "processes", "share"),
    [
        ("0,1,2,3", 2, 2),
        ("0,1,2", 2, 1),
        ("GPU-1a,GPU-2b", 2, 1),
        ("0", 2, None),
        ("", 2, None),
        ("-1", 2, None),
    ],
)
def test_those_that_are_visible_are_shared_out(tmp_path, visible, processes, share):
    assert share_of_gpus(processes, {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == share


def test_else_those_of_the_machine_are(tmp_path):
    assert share_of_gpus(2, {}, tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert share_of_gpus(2, {}, tmp_path) == 2
    assert share_of_gpus(2, {"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == 2
    assert share_of_gpus(5, {}, tmp_path) is None


@pytest.mark.parametrize("given", [{"JAX_PLATFORMS": "cpu"}, {"JAX_CUDA_VISIBLE_DEVICES": "1"}])
def test_who_chose_is_left_alone(tmp_path, given):
    assert share_of_gpus(2, {"CUDA_VISIBLE_DEVICES": "0,1"} | given, tmp_path) is None


def test_one_process_sees_all(tmp_path):
    assert share_of_gpus(1, {"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) is None


def test_each_process_is_given_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert run(tmp_path, "steps=2", "action=show_environment").code == 0
    facts = [
        json.loads((tmp_path / f"attempt-0/facts-{index}").read_text())["given"]
        for index in range(2)
    ]
    assert [each["JAX_CUDA_VISIBLE_DEVICES"] for each in facts] == ["0,1", "2,3"]
