"""The blocks of a document run in order and in one folder, and the figures of a tutorial are collected from them."""

from pathlib import Path

import pytest

from benchmarks import tutorials
from bert_jax.command import UserError
from website.run_blocks import run_blocks

DOCUMENT = """Text.

<!-- run -->

```python
import json
from pathlib import Path

folder = Path("runs/a")
folder.mkdir(parents=True)
(folder / "result.json").write_text(json.dumps({"metrics": {"f1": {"mean": 0.5}}}))
print("a line")
```

<!-- not run: it fails -->

```bash
bert-jax nothing
```

<!-- run -->

```bash
ls runs
python -c 'print("{\\"accuracy\\": 1.0}")'
bert-jax --version > version
echo "{not JSON"
```
"""


def test_marked_blocks_run_in_order_and_their_figures_are_collected(tmp_path):
    document, folder = tmp_path / "page.md", tmp_path / "work"
    document.write_text(DOCUMENT)
    ran = run_blocks(document, folder)
    assert [(one.line, one.printed.splitlines()[0]) for one in ran] == [(5, "a line"), (23, "a")]
    assert (folder / "version").read_text().startswith("bert-jax ") and all(one.cpu_seconds > 0 for one in ran)
    found = tutorials.results_of(ran, folder)
    assert found["metrics"] == {"a": {"f1": {"mean": 0.5}}}
    assert [block["printed"] for block in found["blocks"].values()] == [[], [{"accuracy": 1.0}]]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```bash\necho why >&2; exit 3\n```", "page.md, line 3 ended with code 3: why"),
        ("```text\nx\n```", "page.md, line 3: a block that runs begins with"),
    ],
)
def test_a_block_that_fails_is_named(tmp_path, block, message):
    (tmp_path / "page.md").write_text(f"<!-- run -->\n\n{block}\n")
    with pytest.raises(UserError, match=message):
        run_blocks(tmp_path / "page.md", tmp_path / "work")


def test_the_documents_are_there_and_start_from_the_encoder():
    folder = Path(tutorials.__file__).parent.parent / "docs"
    for name in tutorials.DOCUMENTS:
        assert "init_from=encoder" in (folder / f"{name}.md").read_text(encoding="utf-8")


def test_an_output_that_exists_is_refused(tmp_path):
    (tmp_path / "own_csv").mkdir()
    with pytest.raises(UserError, match="exists"):
        tutorials.main([f"--encoder={tmp_path}", f"--output={tmp_path}", "--only", "own_csv"])
