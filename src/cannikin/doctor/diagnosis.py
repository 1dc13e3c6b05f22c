"""From facts to findings, area by area, and the one sentence that says what will limit a run."""

from __future__ import annotations

from dataclasses import dataclass

from cannikin.doctor.facts import Facts
from cannikin.doctor.findings import LEVELS, Finding
from cannikin.doctor.on_gpus import gpu_findings
from cannikin.doctor.on_host import host_findings
from cannikin.doctor.on_launch import lab_findings, launch_findings
from cannikin.doctor.on_network import network_findings
from cannikin.doctor.on_software import software_findings

__all__ = ["Diagnosis", "diagnose"]

_MOST_LIMITS = 4


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings by area, in the order they are shown, and a sentence about all of them."""

    areas: dict[str, tuple[Finding, ...]]
    summary: str

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them."""
        return tuple(finding for findings in self.areas.values() for finding in findings)

    @property
    def possible(self) -> bool:
        """Whether training can begin at all."""
        return all(finding.level != "blocker" for finding in self.findings)


def diagnose(facts: Facts) -> Diagnosis:
    """What these facts mean for a run.

    Example:
        >>> diagnose(Facts(torch_problem="")).summary
        'Training is impossible as things are: PyTorch is not installed.'
    """
    areas = {
        "Software": tuple(software_findings(facts)),
        "GPUs": tuple(gpu_findings(facts)),
        "Host": tuple(host_findings(facts)),
        "Network": tuple(network_findings(facts)),
        "Launch": tuple(launch_findings(facts)),
        "Lab": tuple(lab_findings(facts)),
    }
    return Diagnosis(areas=areas, summary=_summary([finding for findings in areas.values() for finding in findings]))


def _summary(findings: list[Finding]) -> str:
    """What limits, the worst first; findings of one level in the order they are shown."""
    limiting = [finding for finding in findings if finding.limits]
    blockers = [finding.limits for finding in limiting if finding.level == "blocker"]
    if blockers:
        return f"Training is impossible as things are: {'; '.join(blockers)}."
    limits = [f.limits for f in sorted(limiting, key=lambda finding: -LEVELS.index(finding.level))]
    if not limits:
        return "Nothing here will limit a run beyond what its ranks can compute."
    more = f"; and {len(limits) - _MOST_LIMITS} more" if len(limits) > _MOST_LIMITS else ""
    return f"What will limit a run: {'; '.join(limits[:_MOST_LIMITS])}{more}."
