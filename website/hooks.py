"""MkDocs hooks (mkdocs.yml): pages from outside docs/, links between pages, and captions on how commands are tested."""

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from website import notebooks
from website.code_blocks import CodeBlock, code_blocks
from website.links import PAGES, ROOT, SOURCES, site_line

GENERATED = ROOT / "build" / "docs"
_COMMENT = re.compile(r"^<!--.*-->$")  # Markdown takes the next line as HTML, too, unless it is empty
_log = logging.getLogger("mkdocs.hooks.website")


def on_config(config: Any) -> Any:
    """Drops navigation entries whose page does not exist, and logs them."""
    if not (GENERATED / "reference").is_dir():
        raise PluginError(f"{GENERATED} does not exist. Run: make docs")
    config["nav"] = _existing(config["nav"])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds notebooks and pages from outside docs/."""
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            text = (ROOT / source).read_text(encoding="utf-8")
            content = notebooks.page(text) if source.endswith(".ipynb") else text
            files.append(File.generated(config, page, content=content))
    for path in sorted(GENERATED.rglob("*.md")):
        name = path.relative_to(GENERATED).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    files.append(File.generated(config, "decisions/index.md", content=_decisions_page(decisions)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes a page's links, and adds captions on how command blocks are tested."""
    uri = page.file.src_uri
    blocks = code_blocks(markdown)
    inside = {number for block in blocks for number in range(block.start, block.end)}
    lines = [line if number in inside else site_line(line, uri) for number, line in enumerate(markdown.splitlines())]
    for block in reversed(blocks):
        if caption := checked(block):
            lines[block.end : block.end] = ["", f'<p class="checked" markdown="span">{caption}</p>', ""]
    return "\n".join(lines) + "\n"


def checked(block: CodeBlock) -> str:
    """Describes how tests check a block; empty for a block without a mark."""
    if block.mark == "run":
        return "A test runs this block."
    if block.mark == "not run":
        return f"Not run by a test: {block.reason}."
    return "A test checks the flags and keys of this block, and does not run it." if block.mark else ""


def _existing(entries: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        [(title, value)] = entry.items()
        if isinstance(value, list):
            kept.append({title: _existing(value)})
        elif _exists(value):
            kept.append(entry)
        else:
            _log.info("mkdocs.yml names %s, which does not exist", value)
    return kept


def _exists(page: str) -> bool:
    if page in SOURCES:
        return (ROOT / SOURCES[page]).exists()
    return page == "decisions/index.md" or any((folder / page).exists() for folder in (ROOT / "docs", GENERATED))


def _decisions_page(pages: list[Path]) -> str:
    rows = []
    for page in pages:
        title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# Decisions: ")
        rows.append(f"- [{title[0].upper()}{title[1:]}]({page.name})")
    introduction = "What was decided, why, and the evidence, by area."
    return "\n".join(["# Decisions", "", introduction, "", *rows, ""])
