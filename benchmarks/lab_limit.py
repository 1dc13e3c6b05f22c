"""How near cannikin comes to the best split on CPU ranks of the lab: `python -m benchmarks lab_limit`.

Three ranks of unlike speeds, in five regimes. In each ours trains from an even start; then the step times of a grid of
splits are measured in turns, and the best few again beside ours, LB-BSP's, the paper's and plain DDP's. A second launch
slows rank 0 to half in mid-run. Prints one table per regime, and keeps every figure as JSON lines under --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import launching
from cannikin.lab.mechanisms import MECHANISMS

TOTAL = 256
CHANGE = 100  # step at which rank 0 becomes half as fast, in a launch of its own
LIMIT = {"steps": 200, "passes": 34}
SLOWED = {"steps": 160, "change": CHANGE, "passes": 20}


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Device times, gradient and link that make a regime; `local_gradient_kb` instead, where there are no links."""

    speeds: tuple[float, ...] = (1.0, 0.5, 0.25)
    forward_shares: tuple[float, ...] = (1 / 3, 1 / 3, 1 / 3)
    sample_ms: float
    fixed_ms: float = 5.0
    gradient_kb: float
    link: str | None = None
    local_gradient_kb: float | None = None
    host_ms: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    @property
    def lab_file(self) -> str:
        """The ranks, for `cannikin lab`."""
        link = "" if self.link is None else f'link = "{self.link}"\n'
        ranks = zip(self.speeds, self.forward_shares, strict=True)
        tables = (f"[[rank]]\nspeed = {speed}\nforward_share = {share}\n" for speed, share in ranks)
        return f"sample_ms = {self.sample_ms}\nfixed_ms = {self.fixed_ms}\n{link}{''.join(tables)}"

    @property
    def words(self) -> str:
        """The ranks, for people."""
        link = "no link shaped, portable" if self.link is None else f"links of {self.link}, hosts"
        hosts = f", hosts add {self.host_ms} ms before backward" if any(self.host_ms) else ""
        alike = len(set(self.forward_shares)) == 1
        shares = "" if alike else f", forward shares {', '.join(map(str, self.forward_shares))}"
        return (
            f"speeds {self.speeds}, {self.sample_ms:g} ms per sample at speed 1 and {self.fixed_ms:g} ms per step"
            f"{shares}{hosts}, "
            f"gradient {self.gradient_kb:g} KiB, {link}"
        )


REGIMES = {
    "compute-bound": Regime(sample_ms=0.375, gradient_kb=64),
    "communication-bound": Regime(sample_ms=0.15, gradient_kb=512, link="100mbit", local_gradient_kb=8192),
    # A rank whose host takes long has little backward left to hide the all-reduce behind.
    "mixed": Regime(sample_ms=0.3, gradient_kb=512, link="160mbit", local_gradient_kb=8192, host_ms=[20.0, 0.0, 0.0]),
    # The slow rank spends more of its time in forward, and the all-reduce takes about as long as computing: equal
    # compute times, LB-BSP's aim, are far from the best here. Without links there is no such regime.
    "overlap": Regime(forward_shares=(0.19, 0.19, 0.45), sample_ms=0.45, gradient_kb=600, link="100mbit"),
    "overlap-near": Regime(
        speeds=(1.0, 0.8, 0.6), forward_shares=(0.19, 0.19, 0.45), sample_ms=0.6, gradient_kb=600, link="100mbit"
    ),
}


def without_links(regime: Regime) -> Regime:
    """Return the regime without links: a gradient so large that this machine's own all-reduce decides."""
    if regime.link is None or regime.local_gradient_kb is None:
        return regime
    return replace(regime, link=None, gradient_kb=regime.local_gradient_kb)


def launch(job: str, name: str, regime: Regime, out: Path, *, limit_s: float) -> str:
    """Run one job on a regime's ranks, and return "" where it ended well, else how it ended."""
    keywords = {"total": TOTAL, "gradient_kb": regime.gradient_kb, "host_ms": regime.host_ms}
    keywords |= LIMIT if job == "limit" else SLOWED
    slow = ["--slow", f"0:0.5@{CHANGE}"] if job == "slowed" else []
    about = json.dumps({"regime": name, "ranks": regime.words})
    arguments = ["--out", str(out), "--about", about, job, json.dumps(keywords)]
    script, cluster = Path(__file__).with_name("lab_ranks.py"), out.with_suffix(".toml")
    cluster.write_text(regime.lab_file)
    return launching.run_in_lab([*slow, str(cluster)], script, arguments, limit_s=limit_s)


def table(results: list[dict[str, Any]]) -> str:
    """Return what was measured as a table for people."""
    forms = {"limit": _limit_table, "slowed": _slowed_table}
    return "\n\n".join(forms[r["job"]](r) for r in results)


def _limit_table(r: dict[str, Any]) -> str:
    work = ", ".join(f"{share:.0%}" for share in r["work_share"])
    moves, last_move = len(r["lb_bsp_changes"]), max([0, *r["lb_bsp_changes"]])
    settled = f"settled at step {last_move}" if r["lb_bsp_settled"] else f"not settled after {r['lb_bsp_steps']} steps"
    return "\n".join(
        [
            f"{r['regime']}: {r['ranks']}; B={r['total']}",
            f"  what binds each rank, as learned: {', '.join(r['bottlenecks'])}; real work: {work} of a step",
            *_split_rows(r),
            f"  ours: even start, new plans in force at steps {r['changes']}",
            *_prediction_rows(r),
            f"  LB-BSP (run for real): {settled}, after {moves} moves",
            f"  the paper's method (run for real): {_path(r['paper_plans'])}",
        ]
    )


def _path(plans: list[dict[str, Any]]) -> str:
    return "; ".join(f"step {plan['step']}: {', '.join(map(str, plan['split']))}" for plan in plans)


def _prediction_rows(r: dict[str, Any]) -> list[str]:
    """Return what plans promised before their splits had run, and the last prediction beside the best split."""
    plans, errors = r["predictions"]["plans"], r["predictions"]["before_it_ran"]
    told = "none" if errors is None else f"median {errors['median']:.1%}, worst {errors['worst']:.1%}"
    counted = [f"{p['first_step']}: {p['error']:+.1%} ({p['num_steps']})" for p in plans if p["error"] is not None]
    best_ms = r["split_ms"]["best"]
    return [
        f"  predicted before a split had run, off by: {told}; by first step (steps): {', '.join(counted)}",
        f"  predicted at the end {r['predicted_ms']:.1f} ms, best split measured {best_ms:.1f} ms: "
        f"{r['predicted_ms'] / best_ms - 1:+.1%}",
    ]


def _slowed_table(r: dict[str, Any]) -> str:
    before, hit, after = (r[key] for key in ("before_ms", "hit_ms", "after_ms"))
    return "\n".join(
        [
            f"{r['regime']}, rank 0 at half its speed from step {r['change']} on",
            *_split_rows(r),
            f"  new plans in force at steps {r['changes']}",
            f"  within 5% of the new optimum {r['back_after']} steps after the change; running {before:.1f} ms before, "
            f"{hit:.1f} ms in the first 5 steps after, {after:.1f} ms at the end",
        ]
    )


def _split_rows(r: dict[str, Any]) -> list[str]:
    """Return one row per split that has a name or several, the quickest first."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(r["splits"], key=lambda name: (r["split_ms"][name], name)):
        names.setdefault(tuple(r["splits"][name]), []).append(name)
    rows = [f"  {'local batches':<18} step, ms   medians of rounds  over best  (of {r['num_splits']} splits)"]
    for batches, (name, *others) in names.items():
        ms, rounds = r["split_ms"][name], r["round_ms"][name]
        over, cell = ms / r["split_ms"]["best"], ", ".join(map(str, batches))
        label = ", ".join([name, *others])
        rows.append(f"  {cell:<18} {ms:8.2f}   {min(rounds):7.2f}..{max(rounds):7.2f}  {over:9.3f}  {label}")
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the regimes named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab_limit", description=__doc__)
    parser.add_argument("regimes", nargs="*", default=[], metavar="REGIME", help=", ".join(REGIMES))
    parser.add_argument("--job", choices=("limit", "slowed"), action="append", help="only this; both if left out")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cannikin-lab-limit.jsonl")
    parser.add_argument("--limit-s", type=float, default=1500.0, help="seconds for each launch")
    options = parser.parse_args([] if argv is None else argv)
    launching.empty(options.out)
    missing = MECHANISMS["hosts"].unavailable()
    if missing is not None:
        print(f"lab_limit: no slow links here ({missing}): larger gradients instead", file=sys.stderr)
    for name in options.regimes or REGIMES:
        regime = REGIMES[name] if missing is None else without_links(REGIMES[name])
        if missing is not None and regime.link is not None:
            print(f"lab_limit: {name} needs slow links, and is left out", file=sys.stderr)
            continue
        for job in options.job or ("limit", "slowed"):
            note = launch(job, name, regime, options.out, limit_s=options.limit_s)
            if note:
                print(f"{job} in the {name} regime {note}", file=sys.stderr)
    print(table(launching.read(options.out)))


if __name__ == "__main__":
    main(sys.argv[1:])
