"""Every benchmark whose table stands on the page of performance, one after the other.

    python tests/benchmarks/run_all.py [--quick] [--only bench_NAME ...]

Each runs in a process of its own, on one thread, and writes its JSON and its table; `--quick`
takes small sizes and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tables import named


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--only", nargs="+", choices=named())
    options = parser.parse_args()
    failed = []
    for name in options.only or named():
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
        command += ["--quick"] * options.quick
        print(f"{name}:", flush=True)
        ended = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        failed += [name] if ended.returncode else []
    print(f"failed: {', '.join(failed)}" if failed else "every benchmark ended well")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
