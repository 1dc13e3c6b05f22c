"""Run every benchmark of this package, or those named: `python -m benchmarks [name ...]`."""

import importlib
import sys

# Name -> module, whose `main()` needs no arguments. Other modules here are parts of these, or need to be told of data.
BENCHMARKS = {
    "adaptdl": "adaptdl_overhead",
    "controller": "controller",
    "gpu": "gpu",
    "lab_limit": "lab_limit",
    "noise_digits": "noise_digits",
    "observability": "observability",
    "overhead": "overhead",
    "runlog_size": "runlog_size",
    "solver": "solver",
}


def main(names: list[str]) -> int:
    """Call `main()` of the modules named, or of all; the status says only whether the names were known."""
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark called {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        print(f"== {name}", file=sys.stderr)
        importlib.import_module(f"benchmarks.{BENCHMARKS[name]}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
