"""The blocks of code in Markdown pages, and how each is to be tested.

Comments that readers do not see say what a test needs to know:

    <!-- test: skip: REASON -->     the next block is not run, only parsed
    <!-- test: file NAME -->        the next block is the content of this file
    <!-- test: run                  Python to run unseen, in its place among the page's blocks
    ... -->
    <!-- test: bash                 the same with commands
    ... -->
    <!-- test: ranks 2 -->          the page's Python runs on so many ranks
    <!-- test: needs MODULE -->     the page is tested where this can be imported
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ROOT", "Block", "Page", "execute", "read_page", "slug"]

ROOT = Path(__file__).parent.parent
_PART = re.compile(
    r"^<!-- test: (?P<directive>.*?) ?-->$|^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
_SNIPPET = re.compile(r'^--8<-- "(.+)"\n$')


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block: what it holds, where it begins, and what its comment says."""

    page: str
    line: int
    language: str
    text: str
    skip: str = ""
    file: str = ""
    is_hidden: bool = False
    is_included: bool = False

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """A page's blocks, in order."""

    name: str
    text: str
    blocks: list[Block] = field(default_factory=list)
    num_ranks: int = 1
    needs: str = ""

    def of(self, *languages: str) -> list[Block]:
        """The blocks that are to be run, in these languages."""
        return [block for block in self.blocks if block.language in languages and not (block.skip or block.file)]

    def python(self) -> str:
        """All Python of the page as one text in which each line has the number that it has in the page."""
        lines: list[str] = []
        for block in self.of("python"):
            lines += [""] * (block.line - len(lines)) + block.text.splitlines()
        return "\n".join(lines)


def read_page(path: Path) -> Page:
    """Find the blocks of a page, and what the comments say of them."""
    page = Page(path.relative_to(ROOT).as_posix(), path.read_text())
    waiting: dict[str, str] = {}
    for match in _PART.finditer(page.text):
        line = page.text.count("\n", 0, match.start()) + 1
        word, _, rest = re.sub(r"^(run|bash)\n", r"\1 ", match["directive"] or "").partition(" ")
        if match["directive"] is None:
            text = match["text"]
            included = _SNIPPET.match(text)
            page.blocks.append(
                Block(
                    page=page.name,
                    line=line,
                    language=match["language"].strip(),
                    text=(ROOT / included[1]).read_text() if included else text,
                    is_included=included is not None,
                    **waiting,
                )
            )
            waiting = {}
        elif word in ("run", "bash"):
            language = "python" if word == "run" else "bash"
            page.blocks.append(Block(page=page.name, line=line, language=language, text=rest, is_hidden=True))
        elif word in ("skip:", "file"):
            waiting = {word.rstrip(":"): rest}
        elif word == "ranks":
            page.num_ranks = int(rest)
        elif word == "needs":
            page.needs = rest
        else:
            raise ValueError(f"{page.name}:{line}: unknown comment for the tests: {match['directive']!r}")
    if waiting:
        raise ValueError(f"{page.name}: the comment {waiting} stands before no block")
    return page


def execute(rank: int, world_size: int, code: str, page: str, folder: str) -> None:
    """Run a page's Python in a folder, as one rank of several."""
    os.chdir(folder)
    exec(compile(code, page, "exec"), {"__name__": "__main__"})


def slug(heading: str) -> str:
    """The anchor of a heading, as mkdocs and forges make it.

    >>> slug("What `batch_size` means"), slug("`lr_rule`: how")
    ('what-batch_size-means', 'lr_rule-how')
    """
    words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", words)
