"""cannikin: data-parallel PyTorch training at the best speed a cluster of unlike GPUs can give.

Names resolve on first use (PEP 562), so `import cannikin` is quick and never imports torch, installed or not.
"""

from typing import TYPE_CHECKING, Any

from cannikin._version import __version__ as __version__

if TYPE_CHECKING:
    from cannikin.cluster_file import load_cluster as load_cluster
    from cannikin.core.noise.estimate import NoiseEstimate as NoiseEstimate
    from cannikin.core.noise.estimate import noise_scale as noise_scale
    from cannikin.core.noise.tracker import NoiseTracker as NoiseTracker
    from cannikin.core.perf import Cluster as Cluster
    from cannikin.core.perf import Curve as Curve
    from cannikin.core.perf import step_time as step_time
    from cannikin.core.split import optimal_split as optimal_split
    from cannikin.core.values import Split as Split
    from cannikin.live.view import LiveView as LiveView
    from cannikin.runtime.batch_sampler import HeteroBatchSampler as HeteroBatchSampler
    from cannikin.runtime.engine import Engine as Engine
    from cannikin.runtime.loader import HeteroDataLoader as HeteroDataLoader
    from cannikin.runtime.parallel import HeteroDataParallel as HeteroDataParallel
    from cannikin.runtime.parallel import attach as attach
    from cannikin.runtime.schedulers import by_progress as by_progress
    from cannikin.runtime.snapshot import Snapshot as Snapshot
    from cannikin.trackers import PrometheusObserver as PrometheusObserver
    from cannikin.trackers import ScalarObserver as ScalarObserver
    from cannikin.trackers import TensorBoardObserver as TensorBoardObserver

_HOMES = {
    "cannikin.cluster_file": ["load_cluster"],
    "cannikin.core.noise.estimate": ["NoiseEstimate", "noise_scale"],
    "cannikin.core.noise.tracker": ["NoiseTracker"],
    "cannikin.core.perf": ["Cluster", "Curve", "step_time"],
    "cannikin.core.split": ["optimal_split"],
    "cannikin.core.values": ["Split"],
    "cannikin.live.view": ["LiveView"],
    "cannikin.runtime.engine": ["Engine"],
    "cannikin.runtime.batch_sampler": ["HeteroBatchSampler"],
    "cannikin.runtime.loader": ["HeteroDataLoader"],
    "cannikin.runtime.parallel": ["HeteroDataParallel", "attach"],
    "cannikin.runtime.snapshot": ["Snapshot"],
    "cannikin.runtime.schedulers": ["by_progress"],
    "cannikin.trackers": ["PrometheusObserver", "ScalarObserver", "TensorBoardObserver"],
}
__all__ = sorted(["__version__", *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'cannikin' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ImportError(f"cannikin.{name} needs PyTorch: pip install 'cannikin[torch]'", name="torch") from error
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return list(__all__)
