"""Read mutated inputs in this process, under limits on time and memory.

Prints the totals of each format as JSON.

python tests/fuzzing/campaign.py 0 1000 "records, plain" csv  # inputs 0 to 999 of two formats
"""

import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "formats")]

SECONDS = 20  # for one input: it guards against hangs, not against slow machines
MEMORY = 1 << 30  # bytes beyond the memory of the process at its start
MOST_FAILURES = 20
PROGRESS = "FUZZING_PROGRESS"  # names a file for the input being read, in case the process dies


def main(first: int, count: int, names: list[str]) -> None:
    from readers import (
        FORMATS,
    )  # here, because it imports nearly everything

    path = os.environ.get(PROGRESS)
    progress = os.open(path, os.O_WRONLY | os.O_CREAT) if path else None
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    _limit_memory()
    with tempfile.TemporaryDirectory(dir=place) as home:
        totals = {
            name: _read_all(name, FORMATS[name], range(first, first + count), home, progress)
            for name in names
        }
    print(json.dumps(totals))


def _read_all(
    name: str, chosen: Any, numbers: range, home: str, progress: int | None
) -> dict[str, Any]:
    from readers import WrongAnswerError

    accepted = 0
    refused = 0
    slowest = 0.0
    failures = []
    for number in numbers:
        data = chosen.make(random.Random(f"{name}/{number}"))
        if progress is not None:
            os.pwrite(progress, f"{name} {number}".ljust(60).encode(), 0)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # which ends the process
        started = time.process_time()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                chosen.read(data, Path(home))
            accepted += 1
        except Exception as error:  # noqa: BLE001 - the test is which are allowed
            refused += 1
            if isinstance(error, WrongAnswerError) or not isinstance(error, chosen.errors):
                failures.append(
                    {"number": number, "input": f"{data!r:.500}", "error": traceback.format_exc()}
                )
        signal.setitimer(signal.ITIMER_REAL, 0)
        slowest = max(slowest, time.process_time() - started)
        if len(failures) >= MOST_FAILURES:
            break
    totals = {
        "inputs": accepted + refused,
        "accepted": accepted,
        "refused": refused,
        "slowest": slowest,
    }
    return totals | {"failures": failures}


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
