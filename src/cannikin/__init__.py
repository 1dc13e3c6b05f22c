"""cannikin: data-parallel PyTorch training at the best speed a cluster of unlike GPUs can give.

Names resolve on first use (PEP 562), so `import cannikin` is quick and never imports torch, installed or not.
"""

from typing import TYPE_CHECKING, Any

from cannikin._version import __version__

if TYPE_CHECKING:
    from cannikin.cluster_file import load_cluster
    from cannikin.core.noise.estimate import NoiseEstimate, noise_scale
    from cannikin.core.noise.tracker import NoiseTracker
    from cannikin.core.perf import Cluster, Curve, step_time
    from cannikin.core.split import optimal_split
    from cannikin.core.values import Split
    from cannikin.live.view import LiveView
    from cannikin.runtime.engine import Engine
    from cannikin.runtime.loader import HeteroBatchSampler, HeteroDataLoader
    from cannikin.runtime.parallel import HeteroDataParallel, attach
    from cannikin.runtime.update import by_progress
    from cannikin.trackers.observers import PrometheusObserver, ScalarObserver, TensorBoardObserver

__all__ = [
    "Cluster",
    "Curve",
    "Engine",
    "HeteroBatchSampler",
    "HeteroDataLoader",
    "HeteroDataParallel",
    "LiveView",
    "NoiseEstimate",
    "NoiseTracker",
    "PrometheusObserver",
    "ScalarObserver",
    "Split",
    "TensorBoardObserver",
    "__version__",
    "attach",
    "by_progress",
    "load_cluster",
    "noise_scale",
    "optimal_split",
    "step_time",
]

# Public name -> the module that has it.
_HOMES = {
    "Cluster": "cannikin.core.perf",
    "Curve": "cannikin.core.perf",
    "Engine": "cannikin.runtime.engine",
    "HeteroBatchSampler": "cannikin.runtime.loader",
    "HeteroDataLoader": "cannikin.runtime.loader",
    "HeteroDataParallel": "cannikin.runtime.parallel",
    "LiveView": "cannikin.live.view",
    "NoiseEstimate": "cannikin.core.noise.estimate",
    "NoiseTracker": "cannikin.core.noise.tracker",
    "PrometheusObserver": "cannikin.trackers.observers",
    "ScalarObserver": "cannikin.trackers.observers",
    "Split": "cannikin.core.values",
    "TensorBoardObserver": "cannikin.trackers.observers",
    "attach": "cannikin.runtime.parallel",
    "by_progress": "cannikin.runtime.update",
    "load_cluster": "cannikin.cluster_file",
    "noise_scale": "cannikin.core.noise.estimate",
    "optimal_split": "cannikin.core.split",
    "step_time": "cannikin.core.perf",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cannikin' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ImportError(f"cannikin.{name} needs PyTorch: pip install 'cannikin[torch]'", name="torch") from error
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return list(__all__)
