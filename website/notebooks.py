"""Notebooks as pages of the site: their cells, and what they printed when they were saved."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def page(notebook: str) -> str:
    """Returns the Markdown of a notebook in Jupyter's format 4."""
    return "\n\n".join(_parts(json.loads(notebook)["cells"])) + "\n"


def _parts(cells: list[Mapping[str, Any]]) -> Iterator[str]:
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            shown = output.get("data", {})
            if html := "".join(shown.get("text/html", ())):
                lines = (line for line in html.splitlines() if line.strip())  # an empty one would end the HTML
                yield "\n".join(['<div class="output">', *lines, "</div>"])
            elif text := "".join(shown.get("text/plain", output.get("text", ()))).rstrip():
                yield f"```text\n{text}\n```"
