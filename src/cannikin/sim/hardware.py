"""The ground truth of a simulated cluster: what every step really takes, richer than any planner's model of it.

Legend: n ranks, J gradient buckets, S steps, b local batch.

    t(b)      = (launch^p + (fixed + sample b)^p)^(1/p)      compute: launching kernels, then a device that fills up
    a, P      f t and (1 - f) t, f by kind of device            not lines: a device saturates smoothly
    ready_j   like P, but launch and fixed time count by the bucket's share of layers, and samples by its share of
              operations, each share to the power of the device's skew: gamma is not constant, and devices differ
    c_j       = 2 (n-1) (latency + bytes_j / n / bandwidth), both of the slowest link that the ring passes

Bucket j's all-reduce begins when every rank is ready and bucket j-1 is done. Every time scatters lognormally, with
outliers, and each rank's speed drifts slowly. A rank's own clock begins with its backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cannikin.core.values import FloatArray, IntArray
from cannikin.errors import ClusterFileError
from cannikin.sim.catalog import ClusterSpec, DeviceSpec, NodeSpec, TimesSpec, WorkloadSpec, known_devices

# Assumed, and fixed before any comparison was run.
_OUTLIER_FACTOR = 2.0  # how much longer an outlier takes
_COMM_JITTER, _COMM_OUTLIERS = 0.05, 0.01  # of each bucket's all-reduce
_DRIFT, _DRIFT_STEPS = 0.02, 4000.0  # amplitude and period of a rank's speed
# Measured: the first step at a new batch size took 1.01 to 1.34 of a step, at a known one 1.00 to 1.10 (one H200 over
# NCCL, three such changes, benchmarks/reports/2026-11-16-nccl.md), and 2.9 over gloo on shares of one.
_NEW_SIZE = 0.34


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimes:
    """Moments of S steps, seconds: `before_s` [S, n], `ready_s` and `done_s` [S, n, J] on each rank's own clock."""

    before_s: FloatArray
    ready_s: FloatArray
    done_s: FloatArray

    @property
    def step_s(self) -> FloatArray:
        """Duration of each step, [S]; all ranks see the same."""
        duration: FloatArray = self.before_s[:, 0] + self.done_s[:, 0, -1]
        return duration


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """A cluster running one workload.

    Args:
        names: one per rank.
        launch_s, fixed_s, sample_s: of forward and of backward, [2, n].
        sharpness: p, [n]; inf makes t the larger of the two terms.
        ready_by_layers, ready_by_work: shares of backward after which buckets are ready, [n, J], the last 1.
        bucket_s: c_j, [J].
        max_batch: the most samples that each rank's memory holds, [n].
        jitter, bucket_jitter, outliers: scatter of each rank, [n].
        comm_jitter, comm_outliers, drift: scatter of the all-reduces, and the amplitude of the ranks' drift.
        new_size: excess of a rank's first step at a local batch that it has not run before, times its compute time; the
            runtime does not measure such steps, and neither does the simulator. A known batch after another one costs a
            tenth of that.
    """

    names: tuple[str, ...]
    launch_s: FloatArray
    fixed_s: FloatArray
    sample_s: FloatArray
    sharpness: FloatArray
    ready_by_layers: FloatArray
    ready_by_work: FloatArray
    bucket_s: FloatArray
    max_batch: IntArray
    jitter: FloatArray
    bucket_jitter: FloatArray
    outliers: FloatArray
    comm_jitter: float = _COMM_JITTER
    comm_outliers: float = _COMM_OUTLIERS
    drift: float = _DRIFT
    new_size: float = 0.0

    @property
    def num_ranks(self) -> int:
        """n."""
        return len(self.names)

    @property
    def num_buckets(self) -> int:
        """J."""
        return len(self.bucket_s)

    def compute(self, local_batches: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Return forward and backward seconds without noise, [..., n] each."""
        forward, backward = (
            _smooth_max(launch_s, fixed_s + sample_s * np.asarray(local_batches), self.sharpness)
            for launch_s, fixed_s, sample_s in zip(self.launch_s, self.fixed_s, self.sample_s, strict=True)
        )
        return forward, backward

    def ready(self, local_batches: npt.ArrayLike) -> FloatArray:
        """Return when each bucket is ready after the start of backward, without noise, [..., n, J]."""
        samples_s = (self.sample_s[1] * np.asarray(local_batches))[..., None] * self.ready_by_work
        launch_s, fixed_s = (times[1][:, None] * self.ready_by_layers for times in (self.launch_s, self.fixed_s))
        return _smooth_max(launch_s, fixed_s + samples_s, self.sharpness[:, None])

    def measure(
        self, local_batches: IntArray, first_step: int, rng: np.random.Generator, slowness: FloatArray | None = None
    ) -> StepTimes:
        """Return the times of steps of these local batches, [S, n], with noise; `slowness`, [S, n], multiplies them."""
        steps = len(local_batches)
        if (local_batches == local_batches[0]).all():
            local_batches = local_batches[:1]  # powers are slow: compute them once
        forward, _ = self.compute(local_batches)
        shared = self._drift(first_step, steps) * np.exp(self.jitter * rng.standard_normal((steps, self.num_ranks)))
        if slowness is not None:
            shared = shared * slowness
        slow = np.where(rng.random((2, steps, self.num_ranks)) < self.outliers, _OUTLIER_FACTOR, 1.0)
        own = np.exp(0.5 * self.jitter * rng.standard_normal((2, steps, self.num_ranks))) * slow
        before = forward * shared * own[0]
        ready = self.ready(local_batches) * (shared * own[1])[..., None]
        noise = self.bucket_jitter[:, None] * rng.standard_normal(ready[..., :-1].shape)
        early = np.maximum.accumulate(ready[..., :-1] * np.exp(noise), axis=-1)
        ready[..., :-1] = np.minimum(early, ready[..., -1:])
        return StepTimes(before_s=before, ready_s=ready, done_s=self._reduce(before, ready, rng))

    def _reduce(self, before: FloatArray, ready: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return when each bucket is done, bucket after bucket, on each rank's clock, [S, n, J]."""
        size = (len(before), self.num_buckets)
        factor = np.exp(self.comm_jitter * rng.standard_normal(size))
        times = self.bucket_s * factor * np.where(rng.random(size) < self.comm_outliers, _OUTLIER_FACTOR, 1.0)
        latest = (before[..., None] + ready).max(axis=1)
        moments = np.empty(size)
        moment = np.zeros(len(before))
        for j in range(self.num_buckets):
            moment = np.maximum(moment, latest[:, j]) + times[:, j]
            moments[:, j] = moment
        return moments[:, None, :] - before[..., None]

    def _drift(self, first_step: int, steps: int) -> FloatArray:
        """Return each rank's factor on its times, [S, n]: a slow wave, the ranks out of phase."""
        if not self.drift:
            return np.ones((1, self.num_ranks))
        step = first_step + np.arange(steps)[:, None]
        phase = 2.399963 * np.arange(self.num_ranks)  # the golden angle: no two ranks alike
        wave: FloatArray = np.exp(self.drift * np.sin(2 * math.pi * step / _DRIFT_STEPS + phase))
        return wave


def _smooth_max(launch_s: FloatArray, work_s: FloatArray, sharpness: FloatArray) -> FloatArray:
    """Return (launch^p + work^p)^(1/p), scaled by the larger so that no power overflows."""
    larger, smaller = np.maximum(launch_s, work_s), np.minimum(launch_s, work_s)
    ratio = np.divide(smaller, larger, out=np.zeros_like(larger), where=larger > 0)
    time: FloatArray = larger * (1 + ratio**sharpness) ** (1 / sharpness)
    return time


def build_machine(cluster: ClusterSpec, name: str, workload: WorkloadSpec) -> Machine:
    """Return the cluster of a file running a workload of that name.

    Raises:
        ClusterFileError: a device's memory does not hold one sample.
    """
    nodes = [node for node in cluster.node for _ in range(node.count)]
    devices = [_device(cluster, node.device) for node in nodes]
    times = [_times(cluster, node.device, name) for node in nodes]
    forward = np.array([_forward_share(cluster, node.device) or workload.forward_share for node in nodes])
    parts = np.stack([forward, 1 - forward])

    def each(values: list[float], scale: float = 1.0) -> FloatArray:
        return np.array(values, dtype=np.float64) * scale

    skews = each([device.ready_skew for device in devices])[:, None]
    share = each([node.share for node in nodes])
    return Machine(
        names=tuple(node.name or node.device for node in nodes),
        launch_s=parts * each([time.launch_ms for time in times], 1e-3),
        fixed_s=parts * each([time.fixed_ms for time in times], 1e-3),
        sample_s=parts * each([time.sample_us for time in times], 1e-6) / share,
        sharpness=each([time.sharpness for time in times]),
        ready_by_layers=np.array(workload.ready_by_layers) ** skews,
        ready_by_work=np.array(workload.ready_by_work) ** skews,
        bucket_s=_ring_seconds(cluster, np.array(workload.bucket_mb) * 1e6),
        max_batch=np.array([_limit(cluster, node, name, time) for node, time in zip(nodes, times, strict=True)]),
        jitter=each([device.jitter for device in devices]),
        bucket_jitter=each([device.bucket_jitter for device in devices]),
        outliers=each([device.outliers for device in devices]),
        new_size=_NEW_SIZE,
    )


def _device(cluster: ClusterSpec, name: str) -> DeviceSpec:
    return cluster.device.get(name) or known_devices()[name]


def _forward_share(cluster: ClusterSpec, device_name: str) -> float | None:
    """Return a device's own share, or that of the device it is like."""
    device = _device(cluster, device_name)
    if device.forward_share is None and device.like:
        return known_devices()[device.like].forward_share
    return device.forward_share


def _times(cluster: ClusterSpec, device_name: str, workload: str) -> TimesSpec:
    """Return a device's own times, or those of the device it is like, scaled."""
    device = _device(cluster, device_name)
    if not device.like:
        return device.times[workload]
    source = known_devices()[device.like]
    base = _times(cluster, device.like, workload)
    largest = int(base.max_batch * device.memory_gb / source.memory_gb)
    return TimesSpec(base.launch_ms, base.fixed_ms, base.sample_us / device.speed, base.sharpness, largest)


def _limit(cluster: ClusterSpec, node: NodeSpec, workload: str, times: TimesSpec) -> int:
    """Return the largest batch of a rank: that of its device, in proportion to the memory that it has of it."""
    memory_gb = _device(cluster, node.device).memory_gb
    largest = int(times.max_batch * node.share * (node.memory_gb or memory_gb) / memory_gb)
    if largest < 1:
        key, value = ("memory_gb", node.memory_gb) if node.memory_gb is not None else ("share", node.share)
        raise ClusterFileError(
            f"node[{cluster.node.index(node)}].{key} is {value}: that does not hold one sample of {workload}; the "
            f"whole {node.device} with {memory_gb:g} GB holds {times.max_batch}; raise it or leave the node out"
        )
    return largest


def _ring_seconds(cluster: ClusterSpec, bucket_bytes: FloatArray) -> FloatArray:
    """Return c_j of a ring that visits servers one after another, [J]."""
    num_ranks, link = cluster.num_ranks, cluster.link
    if num_ranks == 1:
        return np.zeros_like(bucket_bytes)
    num_servers = sum(-(-node.count // node.per_server) for node in cluster.node)
    hops = []  # bandwidth and latency of the kinds of hops
    if num_servers > 1:
        slowest_gbit = min([link.bandwidth_gbit, *(node.link_gbit for node in cluster.node if node.link_gbit)])
        hops.append((slowest_gbit, link.latency_us))
    if num_servers == 1 or num_ranks > num_servers:
        hops.append((link.local_bandwidth_gbit, link.local_latency_us))
    # Each of the 2 (n - 1) rounds takes as long as its slowest hop; a round's latency is that hop's as well.
    bytes_per_s, latency_s = min(gbit for gbit, _ in hops) * 1e9 / 8, max(us for _, us in hops) * 1e-6
    seconds: FloatArray = 2 * (num_ranks - 1) * (latency_s + bucket_bytes / num_ranks / bytes_per_s)
    return seconds
