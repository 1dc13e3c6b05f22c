"""What the pages say is true: their code runs, their commands do what is shown, their links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages import ROOT, Block, Page, execute, read_page, slug
from ranks import run_ranks

PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/**/README.md"))]
PATHS += sorted(ROOT.glob("docs/**/*.md"))
PAGES = {page.name: page for page in map(read_page, PATHS)}
BLOCKS = [block for page in PAGES.values() for block in page.blocks]
LINKED = [*PATHS, ROOT / "CHANGELOG.md", *sorted(ROOT.glob("benchmarks/reports/*.md"))]
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def named(pages: list[Page]) -> dict[str, object]:
    return {"argvalues": pages, "ids": [page.name for page in pages]}


def at(blocks: list[Block]) -> dict[str, object]:
    return {"argvalues": blocks, "ids": [block.place for block in blocks]}


def folder_for(page: Page, tmp_path: Path) -> Path:
    """A folder with the files that the page has readers write, and the examples."""
    if page.needs and importlib.util.find_spec(page.needs) is None:
        pytest.skip(f"{page.needs} is not installed")
    for name in ("examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in page.blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    return tmp_path


def run_bash(text: str, folder: Path) -> str:
    """Run as a reader would, with this Python's commands on the path; stdout. What runs beside it ends with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=100)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    # torch's gloo threads now and then abort an orderly exit, of plain DDP too.
    if "terminate called without an active exception" not in errors:
        assert process.returncode == 0, f"{text}\n{output}\n{errors}"
    return output


# Code


@pytest.mark.parametrize("page", **named([page for page in PAGES.values() if page.of("python")]))
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    run_ranks(execute, page.num_ranks, page.python(), page.name, str(folder_for(page, tmp_path)), timeout_s=60)


@pytest.mark.parametrize("page", **named([page for page in PAGES.values() if page.of("bash", "console")]))
def test_the_commands_of_a_page_run_and_print_what_is_shown(page, tmp_path):
    folder = folder_for(page, tmp_path)
    for block in page.of("bash", "console"):
        if block.is_included:
            continue  # a file of its own, for machines of its own: parsed below
        if block.language == "bash":
            run_bash(block.text, folder)
            continue
        for call in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, shown = call.partition("\n")
            printed = iter(run_bash(command, folder).split())
            missing = next((word for word in shown.split() if word.strip("─") and word not in printed), None)
            assert missing is None, f"{block.place}: {command!r} no longer prints {missing!r} in its place"


@pytest.mark.parametrize("block", **at([block for block in BLOCKS if block.skip]))
def test_a_block_that_cannot_be_run_is_listed_with_its_reason(block):
    assert len(block.skip.split()) >= 1
    parse(block)
    pytest.skip(f"not run: {block.skip}")


def parse(block: Block) -> None:
    match block.language:
        case "python":
            ast.parse(block.text)
        case "bash" | "console":
            text = block.text if block.language == "bash" else ""
            done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20)
            assert (done.returncode, done.stderr) == (0, "")
        case "diff":
            for sign in "-+":
                lines = [line for line in block.text.splitlines() if line[:1] in (sign, " ", "")]
                ast.parse(textwrap.dedent("\n".join(line[2:] for line in lines)))
        case "toml":
            tomllib.loads(block.text)
        case "json":
            json.loads(block.text)
        case "yaml":
            list(pytest.importorskip("yaml").safe_load_all(block.text))
        case "text":
            pass
        case language:
            pytest.fail(f"{block.place}: a block in {language!r}, which nothing here can check")


@pytest.mark.parametrize("page", **named([page for page in PAGES.values() if page.blocks]))
def test_every_block_of_a_page_parses(page):
    for block in page.blocks:
        parse(block)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/launch/*")), ids=lambda path: path.name)
def test_every_file_for_launching_parses(path):
    languages = {".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".py": "python", ".md": "text"}
    parse(Block(page=path.name, line=1, language=languages[path.suffix], text=path.read_text()))


def test_a_block_that_no_longer_does_what_it_says_is_noticed(tmp_path):
    page = Page("page.md", "", [Block(page="page.md", line=1, language="console", text="$ echo one two\none three\n")])
    with pytest.raises(AssertionError, match="'echo one two' no longer prints 'three'"):
        test_the_commands_of_a_page_run_and_print_what_is_shown(page, tmp_path)


# Links


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in HEADING.findall(text)}


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(path):
    for pair in LINK.findall(re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)):
        link = pair[0] or pair[1]
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name}: {link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path.name}: {link}: no such heading in {target.name}"


# The site and its figures


def script(name: str) -> object:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_in_the_script_of_the_site_hold():
    result = doctest.testmod(script("docs_site"))
    assert result.attempted > 0
    assert result.failed == 0


def words_in(drawing: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(drawing).iter("{http://www.w3.org/2000/svg}text")]


def test_figures_are_drawn_from_run_logs_and_are_the_ones_in_the_pages(tmp_path):
    script("docs_figures").main(tmp_path)
    drawn = sorted(tmp_path.glob("*.svg"))
    assets = ROOT / "docs" / "assets"
    assert [path.name for path in drawn] == sorted(path.name for path in assets.glob("*.svg"))
    shown = "".join(page.text for page in PAGES.values())
    for path in drawn:
        assert f"assets/{path.name})" in shown
        assert words_in(path) == words_in(assets / path.name), f"{path.name} has changed: make figures"


def test_the_site_builds_without_a_warning_and_asks_no_other_host(tmp_path):
    pytest.importorskip("mkdocstrings_handlers.python")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        asked = re.findall(r'<(?:script|img|link|iframe)[^>]* (?:src|href)="?(https?:[^"\s>]+)', page.read_text())
        assert asked == [], page
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?https?:", sheet.read_text()), sheet
    shutil.rmtree(tmp_path / "site")


def test_every_public_name_has_a_place_in_the_reference():
    pytest.importorskip("torch")
    import cannikin

    homes = {name: getattr(cannikin, name).__module__ for name in cannikin.__all__ if name != "__version__"}
    reference = "".join(page.text for name, page in PAGES.items() if name.startswith("docs/reference/"))
    assert {name for name, home in homes.items() if f"::: {home}.{name}\n" not in reference} == set()
