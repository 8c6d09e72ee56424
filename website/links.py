"""Links of the repository's documents, and where they lead in the documentation site.

docs/ is written to be read in the repository. The site has it, the pages of PAGES, which are elsewhere in the
repository or are notebooks, and generated ones (website/reference.py), but no other files.
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
    """A Markdown document to be shown outside the repository, such as the description of a package.

    Relative links become plain text, or are left out where nothing else is in the line or the parentheses. Relative
    images and comments are left out, too. Code stays as it is.
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
    """A line of Markdown with its links as the page `uri` of the site needs them.

    Links to files that the site does not have become plain text.
    """

    def changed(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        place = site_target(target, uri)
        return text if place is None else f"{image}[{text}]({place})"

    return _LINK.sub(changed, line)


def site_target(target: str, uri: str) -> str | None:
    """Where a link of a page leads in the site: `target` changed, or None where the site does not have the file.

    target   as the repository has it, relative to the source of the page
    uri      the page in the site, such as decisions/index.md
    """
    path, mark, anchor = target.partition("#")
    if not path or _ADDRESS.match(path):
        return target
    source = SOURCES.get(uri, posixpath.join("docs", uri))
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if found in PAGES:
        place = PAGES[found]
    elif found.startswith("docs/"):
        place = found.removeprefix("docs/") + ("/index.md" if (ROOT / found).is_dir() else "")
    elif (ROOT / found).exists():
        return None
    else:
        return target  # MkDocs reports it
    return posixpath.relpath(place, posixpath.dirname(uri) or ".") + mark + anchor
