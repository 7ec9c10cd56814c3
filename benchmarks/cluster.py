"""Speed, memory and restarts of ftrain on several processes and devices.

    python benchmarks/cluster.py                      # everything, about 5 minutes
    python benchmarks/cluster.py processes restart    # only these parts

`processes` and `devices` measure the steps per second of ftrain's loop, on two processes at
127.0.0.1 and on four virtual devices of one process. The run has a log line and summaries every
100 steps, a NaN guard on every step, a step counter and one checkpoint. The bare loop is the same
job written by hand: one donated jit call per step on the same mesh, one batch of numpy arrays put
on the mesh per step, and eight steps in flight. Both loops run in the same processes and alternate
in short rounds; speeds and ratio are those of all rounds together. Three more ratios help on a busy
machine: the median ratio of the rounds, the ratio of the fastest rounds, and the ratio of the CPU
time of the first process. `checkpoint` is the time for which the save blocked training; the fewer
the rounds, the more it affects the ratio. Expected: ratios of at least 0.9.

`fsdp` trains a transformer with Adam on four virtual devices and adds up the bytes of the state on
each device. Expected: at most 0.27 of the state, plus the small leaves that every device has.

`restart` kills one of three processes under `ftrain launch`. It shows the seconds from the
detected failure to the first new step, as the summary of `launch` reports them. Expected: at
most 8.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftrain.launching.child_environment import child_variables, free_addresses

HERE = Path(__file__).parent
PROCESSES, DEVICES = 2, 4
LIMIT = 180  # seconds, for each program that is started
MIN_RATIO = 0.9
MAX_SHARE = 0.27
MAX_RESTART_SECONDS = 8.0
ABOUT = {"mlp": "MLP 64-128-10, batch 128", "wide": "MLP 64-1024-1024-10, batch 512"}
HEADER = (
    f"{'steps per second':<48}{'bare':>8}{'ftrain':>8}"
    f"{'ratio':>10}{'median':>10}{'fastest':>10}{'CPU time':>10}"
)


def compare_processes(rounds: int) -> Iterator[str]:
    yield HEADER
    for job, about in ABOUT.items():
        with tempfile.TemporaryDirectory() as directory:
            command = ["speed", job, "--rounds", f"{rounds}", "--directory", directory]
            yield describe_speed(
                f"{about}, {PROCESSES} processes", run_together(command, PROCESSES)
            )


def compare_devices(rounds: int) -> Iterator[str]:
    yield HEADER
    for job, about in ABOUT.items():
        for fuse in ("auto", "1"):
            result = run_alone(["speed", job, "--rounds", f"{rounds}", "--fuse", fuse])
            line = describe_speed(f"{about}, {DEVICES} devices", result)
            yield f"{line}   fuse={fuse}: {result['fused']}"


def measure_fsdp(rounds: int) -> Iterator[str]:
    result = run_alone(["memory"])
    whole = result["whole"]
    replicated = result["replicated"]
    held = max(result["held"])
    yield (
        f"state of a transformer with Adam, {result['parameters']:,} parameters, fsdp={DEVICES}: "
        f"{whole / 1e6:.1f} MB; on each device at most {held / 1e6:.1f} MB, "
        f"{held / whole:.4f} of the state, including {replicated / whole:.4f} of it in small "
        f"leaves that every device has; expected at most {MAX_SHARE + replicated / whole:.4f}"
    )


def measure_restart(rounds: int) -> Iterator[str]:
    seconds = [restart_once() for _ in range(min(rounds, 3))]
    shown = ", ".join(f"{each:.1f}" for each in seconds)
    yield (
        f"restart of 3 processes after one was killed, s: {shown}; "
        f"expected at most {MAX_RESTART_SECONDS:g}"
    )


def describe_speed(about: str, result: Mapping[str, Any]) -> str:
    bare, ours = (result["seconds"][name] for name in ("bare", "ftrain"))
    speeds = [result["steps"] * len(bare) / sum(seconds) for seconds in (bare, ours)]
    ratios = {
        "all": sum(bare) / sum(ours),
        "median": statistics.median(one / other for one, other in zip(bare, ours, strict=True)),
        "fastest": min(bare) / min(ours),
        "computing": result["computing"]["bare"] / result["computing"]["ftrain"],
    }
    columns = "".join(f"{speed:>8,.0f}" for speed in speeds) + "".join(
        f"{ratio:>10.2f}" for ratio in ratios.values()
    )
    missed = f"   below {MIN_RATIO}" if ratios["all"] < MIN_RATIO else ""
    return f"{about:<48}{columns}   checkpoint {result['saving']:.2f} s{missed}"


def run_alone(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the result of one process with virtual devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    return result_of(run_all(arguments, [{"XLA_FLAGS": flags}]))


def run_together(arguments: Sequence[str], count: int) -> dict[str, Any]:
    """Return the result of one job of several processes on this machine."""
    addresses = free_addresses(count)
    places = [
        child_variables(index, addresses, hang_timeout=LIMIT, attempt=0, inject=None, gpus=None)
        for index in range(count)
    ]
    return result_of(run_all(arguments, places))


def run_all(arguments: Sequence[str], places: Sequence[Mapping[str, str]]) -> str:
    """Run a process in each of these environments; return the output of the first."""
    command = [sys.executable, str(HERE / "cluster_program.py"), *arguments]
    started: list[subprocess.Popen[str]] = []
    try:
        for place in places:
            output = subprocess.DEVNULL if started else subprocess.PIPE
            started.append(
                subprocess.Popen(command, env=os.environ | place, stdout=output, text=True)
            )
        written, _ = started[0].communicate(timeout=LIMIT)
        codes = [process.wait(LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()  # has no effect if it has exited
            process.wait()
    if any(codes):
        raise SystemExit(f"{' '.join(command)} exited with codes {codes}, expected 0")
    return written


def result_of(written: str) -> dict[str, Any]:
    """Return the last line of JSON of an output, to which the runtime may write other lines."""
    return json.loads(next(line for line in reversed(written.splitlines()) if line.startswith("{")))


def restart_once() -> float:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "ftrain", "launch", "-n", "3"]
        command += ["--inject", "kill rank=1 step=40"]
        settings = [
            "steps=80",
            "data.batch_size=96",
            "checkpoint.every_steps=20",
            "evaluation.every_steps=80",
        ]
        config = str(HERE.parent / "configs" / "digits.toml")
        command += [config, *settings, f"run.directory={directory}/run"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
        )
    found = re.findall(r"restarted in ([0-9.]+) s", done.stdout)
    if done.returncode != 0 or len(found) != 1:
        raise SystemExit(
            f"{done.stdout}\nexit code {done.returncode} and {len(found)} restarts; expected 0, 1"
        )
    return float(found[0])


PARTS = {
    "processes": compare_processes,
    "devices": compare_devices,
    "fsdp": measure_fsdp,
    "restart": measure_restart,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"unknown part {name}; expected one of {', '.join(PARTS)}")
    for name in arguments.parts or PARTS:
        for line in PARTS[name](arguments.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
