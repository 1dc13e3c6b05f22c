"""cannikin: data-parallel PyTorch training at the best speed a cluster of unlike GPUs can give."""

from cannikin._version import __version__

__all__ = ["__version__"]
