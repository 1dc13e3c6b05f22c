"""Run every benchmark of this package, or those named: `python -m benchmarks [name ...]`."""

import importlib
import pkgutil
import sys

import benchmarks

NOT_BENCHMARKS = (
    "__main__",
    "synthetic",
    "gpu_models",
    "gpu_ranks",
    "training_run",
    "network_buckets",
    "trace_curves",
    "trace_fits",
)
SHORT_NAMES = {"adaptdl_overhead": "adaptdl"}


def main(names: list[str]) -> int:
    """Call `main()` of the modules named, or of all; the status says only whether the names were known."""
    modules = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    known = {SHORT_NAMES.get(module, module): module for module in modules if module not in NOT_BENCHMARKS}
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no benchmark called {', '.join(unknown)}: choose from {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names or known:
        print(f"== {name}", file=sys.stderr)
        importlib.import_module(f"benchmarks.{known[name]}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
