"""What mkdocs needs beyond the pages in docs/: files from elsewhere in the repository, and the commands' own help.

Pages link to files of the repository as any Markdown there does (`../benchmarks/reports/...`). Those files are put into
the site under `repository/`, and links that leave docs/ are turned towards them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHOWN = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "benchmarks/*.py",
    "benchmarks/reports/**/*",
    "examples/*",
    "examples/clusters/*",
    "examples/launch/*",
    "scripts/*.py",
)
HELP_MARK = "<!-- commands -->"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(?=[)#])")


def site_place(path: str) -> str:
    """Where a file of the repository is in the site.

    >>> site_place("docs/lab.md"), site_place("examples/ncf.py"), site_place("docs/decisions")
    ('lab.md', 'repository/examples/ncf.py', 'decisions/README.md')
    """
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def repository_place(uri: str) -> str:
    """Where a page of the site is in the repository.

    >>> repository_place("lab.md"), repository_place("repository/CHANGELOG.md")
    ('docs/lab.md', 'CHANGELOG.md')
    """
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def turned(link: str, uri: str) -> str:
    """A link as it is written in the repository, turned into one between pages of the site.

    >>> turned("../examples/ncf.py", "lab.md"), turned("quickstart.md", "lab.md")
    ('repository/examples/ncf.py', 'quickstart.md')
    """
    target = posixpath.normpath(posixpath.join(posixpath.dirname(repository_place(uri)), link))
    return posixpath.relpath(site_place(target), posixpath.dirname(uri) or ".")


def commands_help() -> str:
    """Every verb of the command line with its own help."""
    from click.testing import CliRunner

    from cannikin.cli import _VERBS, main

    def help_of(*words: str) -> str:
        return CliRunner().invoke(main, [*words, "--help"], prog_name="cannikin", terminal_width=100).output.strip()

    parts = [f"```text\n{help_of()}\n```"]
    parts += [f"## cannikin {verb}\n\n```text\n{help_of(verb)}\n```" for verb in _VERBS]
    return "\n\n".join(parts)


# mkdocs calls these.


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's files."""
    from mkdocs.structure.files import File

    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                uri = f"repository/{path.relative_to(ROOT).as_posix()}"
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links, and put the commands' help where the mark is."""
    text = _LINK.sub(lambda match: turned(match.group(1), page.file.src_uri), markdown)
    return text.replace(HELP_MARK, commands_help()) if HELP_MARK in text else text
