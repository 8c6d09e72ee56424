"""A workdir says what it holds."""

import pytest

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.heads import Heads
from bert_jax.train.workdir import WorkdirConfig, read_config, write_config


def test_config_is_written_whole_and_read_back(tmp_path):
    model = ModelConfig(vocab_size=100, layers=2, width=8, heads=2, feed_forward=16)
    config = WorkdirConfig(model, Heads(mlm=True, next_sentence=True, pooler=True), training={"steps": 3})
    write_config(tmp_path / "new", config)
    assert read_config(tmp_path / "new") == config
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.json"]


def test_a_missing_damaged_or_foreign_config_is_said(tmp_path):
    with pytest.raises(UserError, match="not a workdir"):
        read_config(tmp_path)
    for text, message in (("{", "not valid JSON"), ('{"model_type": "bert"}', "does not hold the keys")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path)
