"""Ours beside the strongest script that one would write: measured, kept, and shown on the page.

A benchmark whose table stands on `.docs/performance.md` is a script `bench_NAME.py` with a
function that yields rows, and a pair of comments on the page where its table goes:

    from tables import beside, main                     # a script sees its own folder

    def rows(quick: bool, device: str) -> Iterator[dict]:
        for n in (64,) if quick else (64, 256, 2048):
            yield beside(f"map, n = {n}", ours, script, peer="projections and SDPA")

    if __name__ == "__main__":
        main(__file__, rows)

    <!-- begin bench_NAME -->
    <!-- end bench_NAME -->

`python tests/benchmarks/bench_NAME.py [--quick] [--device cuda]` measures, writes
`bench_NAME.json` and the table; `--quick` takes small sizes and writes nothing. Rows of another
machine are kept, so that a run on a GPU adds to those of a CPU. A script whose table has another
shape gives `main` what makes it. `python tests/benchmarks/run_all.py` runs all of the page.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / ".docs" / "performance.md"
USUAL = "AMD EPYC, 1 of 2 cores, torch 2.13.0"  # the page says so above the tables
Rows = Callable[[bool, str], Iterable[dict]]


def machine(device: str = "cpu") -> str:
    """The processor by name, how many threads of it, and which torch."""
    release = torch.__version__.split("+")[0]
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {release}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} of {os.cpu_count()} cores, torch {release}"


def seconds(function: Callable[[], object], device: str = "cpu") -> float:
    """CPU seconds of one call; on a device seconds until it is done."""
    if torch.device(device).type == "cpu":
        start = time.process_time()
        function()
        return time.process_time() - start
    accelerator = torch.get_device_module(torch.device(device).type)
    accelerator.synchronize()
    start = time.perf_counter()
    function()
    accelerator.synchronize()
    return time.perf_counter() - start


def least(
    functions: Iterable[Callable[[], object]],
    *,
    device: str = "cpu",
    lasting: float = 0.5,
    turns: int | None = None,
) -> list[float]:
    """The least time of each, taking turns: so many, or three and more while seconds are left."""
    functions = list(functions)
    found, done, spent = [float("inf")] * len(functions), 0, 0.0
    while done < (turns or 3) or (not turns and spent < lasting and done < 1000):
        for k, function in enumerate(functions):
            once = seconds(function, device)
            found[k], spent = min(found[k], once), spent + once
        done += 1
    return found


def beside(
    case: str,
    ours: Callable[[], object],
    script: Callable[[], object],
    *,
    peer: str,
    device: str = "cpu",
    lasting: float = 0.5,
) -> dict:
    """One row: both times, and the script's over ours, which is above 1 where ours is faster."""
    ours(), script()  # the libraries' own start is nobody's
    first, second = least((ours, script), device=device, lasting=lasting)
    row = {"case": case, "peer": peer, "ours_s": first, "peer_s": second, "ratio": second / first}
    return row | {"machine": machine(device)}


def time_of(value: float) -> str:
    """A time with three digits, in the unit that reads best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def peak_megabytes() -> float:
    """The largest memory that this process has held, and not the one that started it."""
    status = Path("/proc/self/status")  # on Linux `ru_maxrss` begins with that of the parent
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(function: Callable[..., dict], *arguments: object) -> dict:
    """What it returns in a process that has done nothing else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def table(rows: Iterable[dict]) -> str:
    """Rows of `beside` as tables of Markdown, one for each machine that they were measured on."""
    by_machine: dict[str, list[dict]] = {}
    for row in rows:
        by_machine.setdefault(row["machine"], []).append(row)
    return "\n\n".join(_of_one(*one) for one in by_machine.items())


def _of_one(machine: str, rows: list[dict]) -> str:
    lines = ["" if machine == USUAL else f"On {machine}:\n"]
    lines += ["| case | ours | strongest script | its time | ratio |", "|---" * 5 + "|"]
    for row in rows:
        times = time_of(row["ours_s"]), row["peer"], time_of(row["peer_s"]), f"{row['ratio']:.2g}"
        lines.append("| " + " | ".join((row["case"], *times)) + " |")
    return "\n".join(lines).strip()


def named(page: Path = PAGE) -> list[str]:
    """The scripts whose tables the page shows."""
    return re.findall(r"<!-- begin (bench_\w+) -->", page.read_text(encoding="utf-8"))


def show(script: str | Path, markdown: str, page: Path = PAGE) -> None:
    """Write the table of a script between its two comments on the page."""
    name, text = Path(script).stem, page.read_text(encoding="utf-8")
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page}: expected one pair of comments {begin} and {end}")
    before, rest = text.split(begin)
    page.write_text(
        f"{before}{begin}\n\n{markdown}\n\n{end}{rest.split(end)[1]}", encoding="utf-8"
    )


def kept(file: Path, rows: list[dict]) -> list[dict]:
    """These rows, and before them those in the file that another processor measured."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    here = {row["machine"].split(",")[0] for row in rows}
    return [row for row in old if row["machine"].split(",")[0] not in here] + rows


def main(script: str, rows: Rows, *, table: Callable[[list[dict]], str] = table) -> None:
    """The command line of a benchmark; its table is that of the rows of `beside`, or its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for row in rows(options.quick, options.device):
        print(json.dumps(row), flush=True)
        found.append(row)
    if options.quick:
        return
    file = Path(script).with_suffix(".json")
    everything = kept(file, found)
    file.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    show(script, table(everything))
