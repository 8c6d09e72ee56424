"""Links of the repository's documents, and where they lead in the documentation site.

docs/ is written to be read in the repository. The site has it, the pages of PAGES, which are elsewhere in the
repository, and generated ones (website/reference.py), but no other files.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/README.md": "results.md",
    "benchmarks/results/finetuning.md": "results_finetuning.md",
    "benchmarks/results/meshes.md": "results_meshes.md",
    "benchmarks/results/recipes.md": "results_recipes.md",
    "benchmarks/results/references.md": "results_references.md",
    "benchmarks/results/speedrun_recipe.md": "results_speedrun_recipe.md",
    "data_prep/sample/README.md": "sample_text.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\(([^)\s]+)\)")


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
    if not path or re.match(r"[a-z]+:|/", path):
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
