"""The documentation site: its generated pages say what the program has, and every page has its place."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bert_jax
from bert_jax import command_line
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.config.options import keys
from website import code_blocks, figure, links, notebooks, reference

ROOT = Path(__file__).parent.parent
DOCUMENT = """\
# Title

<!-- run -->
```bash
bert-jax recipes
```

A list:

- item

      not code of the page

Text
    that continues

    JAX_PLATFORMS=cpu bert-jax report runs/a

    second line

<!-- not run: it needs a cluster -->

```
$ srun --kill-on-bad-exit=1 bert-jax pretrain
"""


def test_the_page_of_keys_has_every_key_with_its_meaning():
    page = reference.config_page()
    for config_class in (PretrainConfig, FinetuneConfig):
        for key in keys(config_class()):
            assert f"| `{key.name}` |" in page
            assert key.meaning, key.name


def test_the_page_of_exit_codes_has_every_code_of_the_program():
    codes = {value for name, value in vars(command_line).items() if name.startswith("EXIT_")}
    assert set(reference.exit_codes()) == codes | {0}
    assert all(len(meaning.split()) >= 1 for meaning in reference.exit_codes().values())


def test_the_help_of_a_command_is_what_it_prints():
    shown = subprocess.run(
        [sys.executable, "-m", "bert_jax", "recipes", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "100"},
    ).stdout  # fmt: skip
    assert reference.help_text("recipes") == shown


def test_the_python_reference_has_every_public_name_with_its_docstring():
    page = reference.api_page()
    assert "    **options: Any,\n) -> dict[str, Any] | list[dict[str, Any]]" in page
    assert re.findall(r"^## bert_jax\.(\w+)$", page, re.MULTILINE) == list(bert_jax.__all__)
    source = ast.parse((ROOT / "bert_jax" / "api.py").read_text())
    documented = 0
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not overloads(node):
            documented += 1
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            assert first and first in page, node.name
    assert documented >= len(bert_jax.__all__)


def overloads(node: ast.FunctionDef) -> bool:
    """Whether a definition only states types; the one with the code follows it."""
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def test_code_blocks_are_found_with_their_marks():
    run, indented, cluster = code_blocks.code_blocks(DOCUMENT)
    assert (run.language, run.code, run.mark) == ("bash", "bert-jax recipes\n", "run")
    assert (indented.code.splitlines()[-1], indented.mark, indented.has_command) == ("second line", "", True)
    assert (cluster.mark, cluster.reason, cluster.has_command) == ("not run", "it needs a cluster", True)
    for block in (run, indented, cluster):
        lines = DOCUMENT.splitlines()[block.start : block.end]
        assert block.code.splitlines()[0] in "\n".join(lines)


def test_a_notebook_becomes_a_page_with_its_code_and_what_it_printed():
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        assert f"docs/notebooks/{path.name}" in links.PAGES, "add the notebook to PAGES in website/links.py"
    shown = {"text/plain": ["<HTML>"], "text/html": ["<b>x</b>\n\n<i>y</i>"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text"]},
        {
            "cell_type": "code",
            "source": ["a = 1\n", "a"],
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["line\n"]},
                {"output_type": "execute_result", "data": {"text/plain": ["1"]}},
                {"output_type": "display_data", "data": shown},
            ],
        },
    ]
    page = notebooks.page(json.dumps({"cells": cells}))
    assert page.startswith("# Title\nText\n\n```python\na = 1\na\n```\n\n```text\nline\n```\n\n```text\n1\n```")
    assert page.endswith('<div class="output">\n<b>x</b>\n<i>y</i>\n</div>\n')


def test_every_page_has_a_place_in_the_navigation():
    nav = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(nav) == len(set(nav))
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in nav, f"docs/{page.name} is in no section of the site: add it to nav in mkdocs.yml"
    generated = {f"reference/{name}.md" for name in reference.PAGES}
    assert generated == {page for page in nav if page.startswith("reference/")}


@pytest.mark.parametrize(
    ("page", "target", "found"),
    [
        ("index.md", "docs/install.md", "install.md"),
        ("index.md", "docs/decisions", "decisions/index.md"),
        ("index.md", "docs/notebooks/domain_adaptation.ipynb", "notebooks/domain_adaptation.md"),
        ("index.md", "benchmarks/results/README.md#x", "results.md#x"),
        ("recipes.md", "../CHANGELOG.md", "changelog.md"),
        ("recipes.md", "scaling.md#speed", "scaling.md#speed"),
        ("decisions/a.md", "../../README.md", "../index.md"),
        ("decisions/index.md", "a.md", "a.md"),
        ("reference/commands.md", "../recipes.md", "../recipes.md"),
        ("results.md", "../../docs/speedrun.md", "speedrun.md"),
        ("recipes.md", "../bert_jax/config", None),  # a file of the repository that the site does not have
        ("recipes.md", "nonesuch.md", "nonesuch.md"),  # which MkDocs reports
        ("recipes.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("recipes.md", "#here", "#here"),
    ],
)
def test_links_of_the_repository_lead_to_the_same_pages_of_the_site(page, target, found):
    assert links.site_target(target, page) == found


def test_links_to_files_that_the_site_lacks_become_text():
    line = "See [`own.py`](../configs/own.py), [the log](../CHANGELOG.md) and ![a](pipeline.svg)."
    assert links.site_line(line, "recipes.md") == "See `own.py`, [the log](changelog.md) and ![a](pipeline.svg)."


def test_the_description_of_the_package_has_no_relative_link_and_all_text_and_code_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = links.without_relative_links(readme)
    targets = re.findall(r"\]\(([^)]*)\)", "\n".join(line for _, line in code_blocks.outside_of_code(shown)))
    assert all(target.startswith("https://") for target in targets), targets
    assert "![" not in shown and "<!--" not in shown
    assert [block.code for block in code_blocks.code_blocks(shown)] == [
        block.code for block in code_blocks.code_blocks(readme)
    ]
    text = "See [`own`](../own.py), ![a](a.svg)[here](#x) ([more](b.md)) and [there](https://example.org/a.md).\n"
    assert links.without_relative_links(text) == "See `own`, here and [there](https://example.org/a.md).\n"
    assert links.without_relative_links("[All](a.md)\n([a](https://example.org))\n") == "\n([a](https://example.org))\n"


def test_no_line_of_the_drawing_is_behind_a_box():
    drawing = (ROOT / "docs" / "pipeline.svg").read_text()
    boxes = [
        [float(number) for number in found]
        for found in re.findall(
            r'<rect class="box" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawing
        )
    ]
    segments = []
    for path in re.findall(r'class="line"[^>]* d="([^"]+)"', drawing):
        place = [0.0, 0.0]
        for letter, numbers in re.findall(r"([MHV])([\d. ]+)", path):
            start = list(place)
            given = [float(number) for number in numbers.split()]
            place = given if letter == "M" else [given[0], place[1]] if letter == "H" else [place[0], given[0]]
            segments += [(*start, *place)] if letter != "M" else []
    assert len(boxes) == 12 and len(segments) > len(boxes)
    for x, y, width, height in boxes:
        for from_x, from_y, to_x, to_y in segments:
            beside = max(from_x, to_x) <= x or min(from_x, to_x) >= x + width
            above_or_below = max(from_y, to_y) <= y or min(from_y, to_y) >= y + height
            assert beside or above_or_below, f"the line {from_x, from_y, to_x, to_y} crosses the box at {x, y}"


def test_the_figure_of_the_speedrun_shows_the_published_log():
    shown = (ROOT / "docs" / "speedrun.svg").read_text()
    assert shown == figure.published(), "docs/speedrun.svg is older than its log: run python -m website.figure"
    log = [json.loads(line) for line in figure.LOG.read_text().splitlines()]
    [held_out] = re.findall(r'<polyline class="held" points="([^"]+)"', shown)
    assert len(held_out.split()) == sum("eval_mlm_loss" in line for line in log)


def test_every_error_of_the_list_is_one_that_the_program_raises():
    sources = "".join(
        path.read_text(encoding="utf-8")
        for package in ("bert_jax", "data_prep")
        for path in (ROOT / package).rglob("*.py")
    )
    texts = re.findall(r"^### `(.+?)`", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(texts) > 10
    for text in texts:
        parts = [part.strip(" :,.") for part in text.split("…")]
        for part in (part for part in parts if len(part) > 2):
            assert part in sources, f"docs/faq.md lists an error with {part!r}, which no source has"
