"""Translates links of the repository's documents for the documentation site.

docs/ can be read in the repository. The site holds docs/, the files in PAGES (documents elsewhere, notebooks), and
generated pages (website/reference.py), but no other files.
"""

import posixpath
import re
from pathlib import Path

from website.code_blocks import outside_of_code

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/README.md": "results.md",
    "benchmarks/results/finetuning.md": "results_finetuning.md",
    "benchmarks/results/lineage.md": "results_lineage.md",
    "benchmarks/results/meshes.md": "results_meshes.md",
    "benchmarks/results/plans.md": "results_plans.md",
    "benchmarks/results/recipes.md": "results_recipes.md",
    "benchmarks/results/references.md": "results_references.md",
    "benchmarks/results/speedrun_recipe.md": "results_speedrun_recipe.md",
    "data_prep/sample/README.md": "sample_text.md",
    "docs/notebooks/domain_adaptation.ipynb": "notebooks/domain_adaptation.md",
    "docs/notebooks/finetune_and_explain.ipynb": "notebooks/finetune_and_explain.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\(([^)\s]+)\)")
_ASIDE = re.compile(rf"^{_LINK.pattern}$| \({_LINK.pattern}\)")  # a line, or parentheses, with nothing but a link
_ADDRESS = re.compile(r"[a-z]+:|/")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def without_relative_links(text: str) -> str:
    """Prepares a Markdown document for use outside the repository, e.g. as a package's description.

    Relative links become plain text, or are dropped if they are alone on a line or in parentheses. Relative images and
    comments are dropped. Code stays unchanged.
    """

    def is_relative(target: str | None) -> bool:
        return target is not None and not _ADDRESS.match(target)

    def without_aside(found: re.Match[str]) -> str:
        return "" if is_relative(found[3]) or is_relative(found[6]) else found[0]

    def changed(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        return found[0] if not is_relative(target) else "" if image else text

    lines = text.splitlines()
    for number, line in outside_of_code(text):
        lines[number] = _LINK.sub(changed, _ASIDE.sub(without_aside, line))
    return re.sub(r"\n{3,}", "\n\n", _COMMENT.sub("", "\n".join(lines) + "\n"))


def site_line(line: str, uri: str) -> str:
    """Changes the links in a line of Markdown for the page `uri`. Links to files that the site lacks become text."""

    def changed(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        place = site_target(target, uri)
        return text if place is None else f"{image}[{text}]({place})"

    return _LINK.sub(changed, line)


def site_target(target: str, uri: str) -> str | None:
    """Translates a link's target for the site; None if the site lacks the file.

    Args:
        target: The target in the repository, relative to the page's source.
        uri: The page in the site, e.g. decisions/index.md.
    """
    path, mark, anchor = target.partition("#")
    if not path or _ADDRESS.match(path):
        return target
    source = SOURCES.get(uri, posixpath.join("docs", uri))
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if file in PAGES:
        place = PAGES[file]
    elif file.startswith("docs/"):
        place = file.removeprefix("docs/") + ("/index.md" if (ROOT / file).is_dir() else "")
    elif (ROOT / file).exists():
        return None
    else:
        return target  # MkDocs reports it
    return posixpath.relpath(place, posixpath.dirname(uri) or ".") + mark + anchor
