"""The README's quickstart, every example and every config run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import environment, run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCRIPTS = [
    path
    for path in sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("examples/models/*.py")])
    if not path.with_suffix(".toml").exists()
]
CONFIGS = sorted([*ROOT.glob("configs/*.toml"), *ROOT.glob("examples/*.toml")])
CONFIGS.remove(ROOT / "examples" / "cluster.toml")  # it lists processes, not what to train
MODELS = ROOT / "examples" / "models" / "digits.toml"  # tests/models trains it in every library
SHRUNK = {
    "digits.toml": ["steps=40", "model.channels=4"],
    "digits_groups.toml": ["steps=40", "model.channels=4"],
    "digits_records.toml": ["steps=40", "model.channels=4", "model.records=HERE/records"],
    "source_lm.toml": ["steps=4", "model.width=32", "model.layers=1", "model.evaluation_windows=8"],
    "own_task.toml": ["steps=40"],
}


def test_the_quickstart_of_the_readme_is_the_example():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert blocks[0] == example.split('"""', 2)[2].lstrip()
    assert blocks[0].count("\n") <= 26


def test_the_model_of_the_readme_is_the_example():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    example = (ROOT / "examples" / "models" / "digits_linen.py").read_text()
    assert any(block in example for block in blocks)


def some(paths: list[Path], *names: str) -> list:
    """Mark every path as campaign, except those with these names."""
    marks = {path: [] if path.name in names else [pytest.mark.campaign] for path in paths}
    return [pytest.param(path, marks=marks[path], id=path.name) for path in paths]


@pytest.mark.parametrize(
    "path", some(SCRIPTS, "quickstart.py", "own_loop.py", "records.py", "digits_nnx.py")
)
def test_every_example_runs(path, tmp_path):
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = {
        "quickstart.py": r"Array\(3\.0",
        "processes.py": r"Array\(3\.0",
        "own_loop.py": "the loss is below 0.001",
        "monitored.py": r"(?s)recovered.*stopped: eval/error.*waiting for the device",
        "records.py": (
            r"(?s)ended with the same parameters.*record \d+ at byte \d+ is damaged"
            r".*left out: 1 record"
        ),
        "trusted.py": (
            r"(?s)latest is 4, the best 2.*kernel has other values than.*from step 3.*carried over"
        ),
        "embeddings.py": (
            r"(?s)step 1000: loss \d\.\d+e-(0[6-9]|1\d).*100 of 200,000 rows were trained"
        ),
    }
    of_models = r"accuracy 0\.9[789]\d, F1 0\.9[789]\d on held-out images"
    assert re.search(results.get(path.name, of_models), done.stdout)


@pytest.mark.parametrize("path", some(CONFIGS, "own_task.toml", "digits_records.toml"))
def test_every_config_trains_and_is_evaluated(path, tmp_path):
    shrunk = [override.replace("HERE", str(tmp_path)) for override in SHRUNK[path.name]]
    done = run("train", path, f"run.directory={tmp_path / 'run'}", *shrunk, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    evaluated = run("eval", tmp_path / "run", cwd=ROOT)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "eval/" in evaluated.stdout


def test_the_shipped_digits_reach_their_accuracy(tmp_path):
    done = run("train", ROOT / "configs" / "digits.toml", f"run.directory={tmp_path}")
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"step 2000: .*eval/accuracy ([0-9.]+)", done.stdout)
    assert float(accuracies[-1]) >= 0.98


@pytest.mark.parametrize("path", [*SCRIPTS, *CONFIGS, MODELS], ids=lambda path: path.name)
def test_it_opens_with_its_command_time_and_result(path):
    opening = path.read_text()[:500]
    for word in ("Command: ", "Time: ", "Result: "):
        assert word in opening


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-newest.txt"])
def test_no_address_of_a_registry_is_pinned(name):
    lines = (ROOT / name).read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[0-9][\w.+]*", line) for line in lines)


def test_the_readme_names_every_table_and_command():
    from ftrain.config.plan import NAMED, SECTIONS

    for table in [*SECTIONS, *NAMED]:
        assert f"`[{table}]`" in README
    assert "`[[hooks]]`" in README
    for command in ("train", "eval", "check", "replay", "schedule", "schema", "migrate"):
        assert f"ftrain {command}" in README
