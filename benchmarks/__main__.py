"""Run every benchmark of this package, or those named: `python -m benchmarks [NAME ...]`.

Options behind one name are that benchmark's own: `python -m benchmarks paper --help`.
"""

import importlib
import sys
from itertools import takewhile

# Name -> module, whose `main()` needs no arguments. Other modules here are parts of these, or need data.
BENCHMARKS = {
    "adaptdl": "adaptdl_overhead",
    "adapters": "adapters",
    "advice": "advice",
    "chaos": "chaos.run",
    "controller": "controller",
    "first_split": "first_split",
    "gpu": "gpu",
    "layer_split": "layer_split",
    "lab_limit": "lab_limit",
    "loops": "loops",
    "noise_adam": "noise_adam",
    "noise_digits": "noise_digits",
    "observability": "observability",
    "orders": "orders",
    "overhead": "overhead",
    "paper": "paper.evaluate",
    "resuming": "resuming",
    "returning": "returning",
    "runlog_size": "runlog_size",
    "settling": "settling",
    "snapshot": "snapshot",
    "soak": "soak",
    "solver": "solver",
}
# Those whose `main()` takes a list of options.
WITH_OPTIONS = ("adapters", "advice", "chaos", "gpu", "lab_limit", "paper", "resuming", "settling", "snapshot", "soak")


def main(arguments: list[str]) -> int:
    """Call `main()` of the modules named, or of all; the status says only whether the arguments were known."""
    names = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = arguments[len(names) :]
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark called {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    if options and (len(names) != 1 or names[0] not in WITH_OPTIONS):
        print(f"{options[0]}: options follow one name out of {', '.join(WITH_OPTIONS)}", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        print(f"== {name}", file=sys.stderr)
        importlib.import_module(f"benchmarks.{BENCHMARKS[name]}").main(*([options] if options else []))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
