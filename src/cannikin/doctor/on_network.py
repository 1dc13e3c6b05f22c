"""Findings about the links that gradients go through."""

from __future__ import annotations

from collections.abc import Iterator

from cannikin.doctor.facts import Facts, LoopbackFacts
from cannikin.doctor.findings import Finding, note, ok, rate, warning

__all__ = ["network_findings"]

_SLOW_MBIT = 10_000
_EXAMPLE_BYTES = 100e6  # the gradients of 25 million float32 parameters
_CHOICES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def network_findings(facts: Facts) -> Iterator[Finding]:
    """Interfaces and their speed, which of them is used, and what gloo reaches on this host."""
    yield from _interfaces(facts)
    yield from (ok("InfiniBand", adapter) for adapter in facts.infiniband)
    yield from _choice(facts)
    if facts.host_resolves is False:
        yield warning(
            "own name",
            f"the name of this host, {facts.hostname}, leads to no address, which gloo asks for",
            f"Add '127.0.0.1 {facts.hostname}' to /etc/hosts, or set GLOO_SOCKET_IFNAME.",
            limits="gloo may not find its own address",
        )
    if facts.loopback is not None:
        yield _loopback(facts.loopback)


def _interfaces(facts: Facts) -> Iterator[Finding]:
    """Each with what it is; a slow one counts where several hosts train together."""
    real = [interface for interface in facts.interfaces if interface.name not in {"lo", "lo0"}]
    if facts.interfaces and not real:
        yield note("interfaces", "none but loopback is up: ranks of this host can train, several hosts cannot")
    fastest = max((interface.speed_mbit or 0 for interface in real), default=0)
    for interface in real:
        kind = " (virtual)" if interface.virtual else ""
        if interface.speed_mbit is None:
            yield ok(interface.name, f"up{kind}, the kernel does not say how fast")
        elif interface.speed_mbit < _SLOW_MBIT and facts.num_hosts > 1 and interface.speed_mbit == fastest:
            seconds = _EXAMPLE_BYTES * 8 / (interface.speed_mbit * 1e6)
            yield warning(
                interface.name,
                f"{rate(interface.speed_mbit)}{kind} between {facts.num_hosts} hosts: to send the gradients of 25 "
                f"million parameters takes it {seconds:.2g} s",
                "Train with larger batches (max_batch_size), a bf16 comm_wrapper, or a faster link.",
                limits=f"a link of {rate(interface.speed_mbit)} between hosts",
            )
        else:
            yield ok(interface.name, f"{rate(interface.speed_mbit)}{kind}")


def _choice(facts: Facts) -> Iterator[Finding]:
    names = [interface.name for interface in facts.interfaces]
    for variable in _CHOICES:
        value = facts.environment.get(variable)
        if value is None or not names or value.startswith(("^", "=")):
            continue
        exact = variable.startswith("GLOO")  # NCCL takes beginnings of names
        wanted = [part for part in value.split(",") if part]
        if not any(name == part or (not exact and name.startswith(part)) for part in wanted for name in names):
            yield warning(
                "choice",
                f"{variable}={value} names no interface that is up here: there are {', '.join(names)}",
                f"Set {variable} to the one that leads to the other hosts.",
                limits=f"{variable} names no interface",
            )
    real = [interface.name for interface in facts.interfaces if interface.name not in {"lo", "lo0"}]
    if facts.num_hosts > 1 and len(real) > 1 and not any(facts.environment.get(name) for name in _CHOICES):
        yield note(
            "choice",
            f"several interfaces ({', '.join(real)}) and nothing that says which leads to the other hosts",
            f"If ranks do not find one another, set {' and '.join(_CHOICES)}.",
        )


def _loopback(measured: LoopbackFacts) -> Finding:
    if measured.problem is not None or not measured.latency_s or not measured.bytes_per_s:
        return warning(
            "gloo",
            f"two processes on this host did not all-reduce: {measured.problem or 'nothing was measured'}",
            "Try again on a quiet machine; if it stays, GLOO_SOCKET_IFNAME=lo tells whether interfaces are the reason.",
            limits="gloo does not work between processes of this host",
        )
    return ok(
        "gloo",
        f"two processes on this host's loopback: {measured.latency_s * 1e6:.0f} microseconds a small all-reduce, "
        f"{measured.bytes_per_s / 1e9:.2g} GB/s a large one; it says nothing of links between hosts",
    )
