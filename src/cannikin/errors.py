"""The exceptions of cannikin: one tree, so that `except CannikinError` catches whatever we raise on purpose.

A message says what was wrong (with the value), the limit or reason, and what to do. Bad arguments are `ValueError`s as
well, so code that knows nothing of cannikin handles them as it handles numpy's or torch's.
"""


class CannikinError(Exception):
    """Base of everything cannikin raises on purpose."""


class InvalidInputError(CannikinError, ValueError):
    """An argument is malformed or impossible."""


class InfeasibleError(InvalidInputError):
    """A policy has no split of this total batch within the ranks' bounds."""


class ClusterFileError(InvalidInputError):
    """A cluster file is unreadable, malformed or impossible; the message names file, key and limit."""


class RunLogError(InvalidInputError):
    """A run log is missing, is not one, has another version, or belongs to another run; the message names the file."""


class StateError(InvalidInputError):
    """A saved state does not fit the object it is loaded into."""


class DisagreementError(InvalidInputError):
    """Ranks of one job were given different settings; raised on every one of them."""


class BatchMatchError(CannikinError, RuntimeError):
    """A forward pass cannot be matched to a batch that the loader handed out."""


class RankLostError(CannikinError, RuntimeError):
    """A collective failed because of another rank; the message names it, where it was last, and what to do."""


class MechanismError(CannikinError, RuntimeError):
    """This machine cannot make the cluster that the lab was asked for; the message says what is missing."""
