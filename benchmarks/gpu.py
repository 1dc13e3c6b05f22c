"""cannikin on unequal shares of one NVIDIA GPU: `python -m benchmarks gpu`, or `python -m benchmarks.gpu PART ...`.

Parts: `overhead` (plain DDP against ours with an even plan), `limit` (step times of splits, and what ours settles on),
`sharing` (a load that begins on one share in mid-run), and by name only `settling` (the split at step 30, from ten
starts). Each rank has a share of the GPU by MPS, through `cannikin lab`, and gloo between them. Prints one table, and
keeps every figure as JSON lines under --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import launching

Launch = tuple[tuple[float, ...], list[tuple[str, dict[str, Any]]]]  # shares of the GPU; functions and their keywords

THREE, FOUR = (0.60, 0.25, 0.12), (0.40, 0.25, 0.15, 0.10)
PARTS: dict[str, list[Launch]] = {
    "overhead": [
        (
            THREE,
            [
                ("overhead", {"kind": "resnet18", "local_batch": 64, "rounds": 160}),
                ("overhead", {"kind": "resnet18", "local_batch": 256, "rounds": 120}),
                (
                    "overhead",
                    {"kind": "gpt2-small", "local_batch": 2, "rounds": 80, "variants": ["raw", "control", "ours"]},
                ),
            ],
        )
    ],
    "limit": [
        (THREE, [("limit", {"total": total, "steps": 180, "largest": 4096}) for total in (192, 768, 1536, 4096)]),
        (FOUR, [("limit", {"total": total, "steps": 180, "largest": 4096}) for total in (384, 1536)]),
    ],
    "sharing": [(THREE, [("sharing", {"total": 1536, "steps": 240, "disturbed": 0, "start": 100, "rounds": 25})])],
    "settling": [(THREE, [("settling", {"total": 768, "runs": 10, "steps": 46, "rounds": 80})])],
}


def table(results: list[dict[str, Any]]) -> str:
    """Return what was measured as a table for people."""
    forms = {"overhead": _overhead_line, "limit": _limit_line}
    return "\n".join(forms.get(r["job"], json.dumps)(r) for r in results)


def _overhead_line(r: dict[str, Any]) -> str:
    cells = [
        f"{variant} {apart:+.2f} ms ({apart / r['raw_ms']:+.2%}, mean {r['mean_ms'][variant] / r['raw_ms']:+.2%})"
        for variant, apart in r["median_ms"].items()
        if variant != "raw"
    ]
    head = f"overhead {r['model']} b={r['local_batch']} on {r['ranks']} ranks, {r['rounds']} rounds"
    return f"{head}: raw {r['raw_ms']:.2f} ms (IQR {r['spread_pct']:.1f}%); paired: {'; '.join(cells)}"


def _limit_line(r: dict[str, Any]) -> str:
    best_ms = r["split_ms"]["best"]
    cells = [f"{name} {ms:.1f} ms ({ms / best_ms:.3f}) {r['splits'][name]}" for name, ms in r["split_ms"].items()]
    return (
        f"limit B={r['total']}: {'; '.join(cells)}; of {r['num_candidates']} splits; "
        f"predicted {r['predicted_ms']:.1f}, running {r['running_ms']:.1f} ms ({r['prediction_error_pct']:.1f}%); "
        f"last change at step {r['settled_at']}; LB-BSP after {r['lb_bsp_windows']} moves"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the parts named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cannikin-gpu.jsonl")
    parser.add_argument("--limit-s", type=float, default=280.0, help="seconds for each launch")
    options = parser.parse_args([] if argv is None else argv)
    if shutil.which("nvidia-cuda-mps-control") is None:
        print("gpu: skipped, there is no NVIDIA GPU with MPS here")
        return
    launching.empty(options.out)
    script = Path(__file__).with_name("gpu_ranks.py")
    for part in options.parts or ("overhead", "limit", "sharing"):  # within ten minutes
        for shares, jobs in PARTS[part]:
            lab_options = ["--mechanism", "mps", "--ranks", ",".join(map(str, shares))]
            arguments = ["--out", str(options.out), "--jobs", json.dumps(jobs)]
            note = launching.run_in_lab(lab_options, script, arguments, limit_s=options.limit_s)
            if note:
                print(f"{part} on shares {shares} {note}", file=sys.stderr)
    print(table(launching.read(options.out)))


if __name__ == "__main__":
    main(sys.argv[1:])
