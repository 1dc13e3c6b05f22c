"""Runs torchrun and notes what its ranks died of: `python -m cannikin.lab.agent NAME <torchrun's arguments>`.

torchrun itself exits with 1 whatever a rank's status was, and prints a page of text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cannikin.lab.run_folder import FOLDER, Exit, end_with_parent, note_exits


def main() -> None:
    """Run torchrun with our arguments; exit with 1 where a rank failed."""
    end_with_parent()  # the launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    name, arguments = sys.argv[1], sys.argv[2:]
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        deaths = [Exit(rank=rank, status=failure.exitcode) for rank, failure in error.failures.items()]
        note_exits(Path(os.environ[FOLDER]), f"agent{name}", deaths)
        sys.exit(1)
    except SignalException as end:
        sys.exit(128 + end.sigval)


if __name__ == "__main__":
    main()
