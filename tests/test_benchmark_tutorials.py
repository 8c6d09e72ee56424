"""The blocks of a document run in order and in one folder, and the figures of a tutorial are collected from them."""

from pathlib import Path

import pytest
from random_checkpoints import odd_config, random_checkpoint

from benchmarks import tutorials
from bert_jax.command import UserError
from bert_jax.export import export_loaded
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads import Heads
from website.code_blocks import code_blocks
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
    assert found["tokens"] == found["models"] == {}


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
    blocks = code_blocks((folder / "adapting.md").read_text(encoding="utf-8"))
    chosen = [block.code for block in blocks if block.reason == tutorials.REASON]
    assert len(chosen) == 2 and all("BERT_JAX_DATA" in code and " encoder" in code for code in chosen)


def test_shards_and_checkpoints_are_counted(tmp_path):
    export_loaded(random_checkpoint(tmp_path / "words", odd_config(layers=1), Heads(mlm=True)), tmp_path / "grown")
    (tmp_path / "german").mkdir()
    (tmp_path / "german" / "manifest.json").write_text('{"counts": {"tokens": 9}}')
    found = tutorials.results_of([], tmp_path)
    assert found["tokens"] == {"german": 9} and found["models"]["grown"][0] == 131
    assert found["models"]["grown"][1] == tutorials.parameters(open_checkpoint(tmp_path / "grown"))


def test_an_output_that_exists_is_refused(tmp_path):
    (tmp_path / "own_csv").mkdir()
    with pytest.raises(UserError, match="exists"):
        tutorials.main([f"--encoder={tmp_path}", f"--output={tmp_path}", "--only", "own_csv"])
