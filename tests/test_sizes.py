import jax
import pytest

from bert_jax.command import UserError
from bert_jax.config import ModelOptions
from bert_jax.model import sizes
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.shapes import padded_vocabulary

UNCASED, CASED = 30522, 28996  # ids of Google's two English vocabularies

# Exact integers of transformers' BertModel with pooler for the published configurations; google-research/bert's
# README rounds them to 4.4, 11.3, 29.1, 41.7, 110 and 340 million (some with the MLM head).
PUBLISHED = [
    ("tiny", UNCASED, 4_385_920),
    ("mini", UNCASED, 11_170_560),
    ("small", UNCASED, 28_763_648),
    ("medium", UNCASED, 41_373_184),
    ("base", UNCASED, 109_482_240),
    ("large", UNCASED, 335_141_888),
    ("base", CASED, 108_310_272),
]


@pytest.mark.parametrize(("preset", "vocab_size", "published"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(preset, vocab_size, published):
    config = sizes.model_config(ModelOptions(preset=preset), vocab_size)
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config, Heads(pooler=True))))
    assert count - (padded_vocabulary(vocab_size) - vocab_size) * config.width == published


def test_heads_are_64_wide_and_the_feed_forward_four_times_the_width():
    for preset in sizes.PRESETS:
        config = sizes.model_config(ModelOptions(preset=preset), UNCASED)
        assert config.width == 64 * config.heads
        assert config.feed_forward == 4 * config.width


def test_options_override_the_preset_and_attention_dropout_follows_dropout():
    config = sizes.model_config(ModelOptions(preset="tiny", max_positions=64, dropout=0.0), 100)
    assert (config.max_positions, config.dropout, config.attention_dropout) == (64, 0.0, 0.0)
    config = sizes.model_config(ModelOptions(preset="tiny", attention_dropout=0.0), 100)
    assert (config.max_positions, config.dropout, config.attention_dropout) == (512, 0.1, 0.0)


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(UserError, match="'huge'; use one of: tiny, mini"):
        sizes.model_config(ModelOptions(preset="huge"), 100)
