import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import pytest

import bert_jax.lineage  # noqa: F401 (adds its encoders)
from bert_jax.config import ModelConfig, ModelOptions
from bert_jax.config.model import RELATIVE
from bert_jax.errors import UserError
from bert_jax.lineage import FeedForward
from bert_jax.model import sizes
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.shapes import padded_vocabulary

UNCASED, CASED, MULTILINGUAL = 30522, 28996, 119547  # ids of Google's vocabularies

POOLED = Heads(pooler=True)
PRETRAINING = Heads(mlm=True, next_sentence=True, pooler=True)
MASKED = Heads(mlm=True)
CAUSAL = Heads(lm=True)
NONE = Heads()
REPLACED = Heads(replaced_tokens=True)


def pair(width: int) -> Heads:
    """The heads of a discriminator with a generator of that width."""
    return Heads(replaced_tokens=True, generator=width)


class Reference(NamedTuple):
    """A published configuration, and the exact number of parameters of its reference implementation.

    The integers are printed by tests/tools/count_parameters.py, from transformers' classes of these names.
    """

    preset: str
    vocab_size: int
    heads: Heads
    count: int
    source: str
    rounded: str  # as its authors write it
    options: Mapping[str, Any] = MappingProxyType({})


REFERENCES = [
    Reference("tiny", UNCASED, POOLED, 4_385_920, "BertModel", "4.4 M"),
    Reference("mini", UNCASED, POOLED, 11_170_560, "BertModel", "11.3 M"),
    Reference("small", UNCASED, POOLED, 28_763_648, "BertModel", "29.1 M"),
    Reference("medium", UNCASED, POOLED, 41_373_184, "BertModel", "41.7 M"),
    Reference("base", UNCASED, POOLED, 109_482_240, "BertModel", "110 M"),
    Reference("base", UNCASED, PRETRAINING, 110_106_428, "BertForPreTraining", "110 M"),
    Reference("base", CASED, POOLED, 108_310_272, "BertModel", "110 M"),
    Reference("base", MULTILINGUAL, POOLED, 177_853_440, "BertModel", "110 M (multilingual.md counts as for English)"),
    Reference("large", UNCASED, POOLED, 335_141_888, "BertModel", "340 M"),
    Reference("large", UNCASED, PRETRAINING, 336_226_108, "BertForPreTraining", "340 M"),
    Reference("large", CASED, POOLED, 333_579_264, "BertModel", "340 M"),
    Reference("roberta_base", 50265, POOLED, 124_645_632, "RobertaModel", "125 M"),
    Reference("roberta_base", 50265, MASKED, 124_697_433, "RobertaForMaskedLM", "125 M"),
    Reference("roberta_large", 50265, POOLED, 355_359_744, "RobertaModel", "355 M"),
    Reference("roberta_large", 50265, MASKED, 355_412_057, "RobertaForMaskedLM", "355 M"),
    Reference("xlmr_base", 250002, POOLED, 278_043_648, "XLMRobertaModel", "270 M"),
    Reference("xlmr_base", 250002, MASKED, 278_295_186, "XLMRobertaForMaskedLM", "270 M"),
    Reference("xlmr_large", 250002, POOLED, 559_890_432, "XLMRobertaModel", "550 M"),
    Reference("xlmr_large", 250002, MASKED, 560_142_482, "XLMRobertaForMaskedLM", "550 M"),
    Reference("spanbert_base", CASED, POOLED, 108_310_272, "BertModel", "110 M"),
    Reference("spanbert_large", CASED, POOLED, 333_579_264, "BertModel", "340 M"),
    Reference("academic_large", UNCASED, POOLED, 335_143_936, "RobertaPreLayerNormModel", "none given"),
    # BertEmbeddings, BertLayers and BertPooler of mosaicml/examples, benchmarks/bert/src/bert_layers.py; theirs have no
    # bias in the gated matmul; bert_jax has: 2 F a layer.
    Reference("mosaicbert_base", UNCASED, POOLED, 137_363_712 + 12 * 2 * 3072, "MosaicBERT", "137 M"),
    Reference("mosaicbert_large", UNCASED, POOLED, 435_182_592 + 24 * 2 * 4096, "MosaicBERT", "434 M"),
    Reference("modernbert_base", 50368, NONE, 149_014_272, "ModernBertModel", "149 M"),
    Reference("modernbert_base", 50368, MASKED, 149_655_232, "ModernBertForMaskedLM", "149 M"),
    Reference("modernbert_large", 50368, NONE, 394_781_696, "ModernBertModel", "395 M"),
    Reference("modernbert_large", 50368, MASKED, 395_881_664, "ModernBertForMaskedLM", "395 M"),
    # The paper's 65 M are those of encoder and decoder, with one table of about 37,000 tokens.
    Reference("transformer_base", 37000, NONE, 18_914_304 + 37000 * 512, "torch.nn.TransformerEncoder", "65 M"),
    # transformers 4's relative_key clips at 511; its unread table of positions is left out.
    Reference("shaw_base", UNCASED, POOLED, 109_874_688, "BertModel", "none given", {"relative_distance": 511}),
    Reference("buckets_base", 30527, POOLED, 109_486_464, "MPNetModel", "110 M"),
    Reference("albert_base", 30000, POOLED, 11_683_584, "AlbertModel", "12 M"),
    Reference("albert_base", 30000, PRETRAINING, 11_813_810, "AlbertForPreTraining", "12 M"),
    Reference("albert_large", 30000, POOLED, 17_683_968, "AlbertModel", "18 M"),
    Reference("albert_xlarge", 30000, POOLED, 58_724_864, "AlbertModel", "60 M"),
    Reference("albert_xxlarge", 30000, POOLED, 222_595_584, "AlbertModel", "235 M"),
    Reference("albert_base_v2", 30000, PRETRAINING, 11_813_810, "AlbertForPreTraining", "12 M"),
    Reference("albert_large_v2", 30000, POOLED, 17_683_968, "AlbertModel", "18 M"),
    Reference("albert_xlarge_v2", 30000, POOLED, 58_724_864, "AlbertModel", "60 M"),
    Reference("electra_small", UNCASED, NONE, 13_483_008, "ElectraModel", "14 M"),
    Reference("electra_small", UNCASED, REPLACED, 13_549_057, "ElectraForPreTraining", "14 M"),
    Reference("electra_base", UNCASED, REPLACED, 109_483_009, "ElectraForPreTraining", "110 M"),
    Reference("electra_large", UNCASED, REPLACED, 335_142_913, "ElectraForPreTraining", "335 M"),
    # With ElectraForMaskedLM of the generator's size, less the embeddings that both share.
    Reference("electra_small", UNCASED, pair(64), 13_549_057 + 4_620_026 - 3_972_864, "both", "none given"),
    Reference("electra_base", UNCASED, pair(256), 109_483_009 + 33_740_602 - 23_837_184, "both", "none given"),
    Reference("electra_large", UNCASED, pair(256), 335_142_913 + 51_295_290 - 31_782_912, "both", "none given"),
    Reference("gpt", 40478, NONE, 116_534_784, "OpenAIGPTLMHeadModel", "117 M"),
    # |V| (m + h) + h (1 + (n - 1) m): Bengio et al. 2003, section 2, without direct connections and output biases.
    Reference("feed_forward_lm", 10000, CAUSAL, 10_000 * 200 + 100 * (1 + 4 * 100), "the formula", "none given"),
    # torch.nn.Embedding, RNN or LSTM, Linear; less what bert_jax lacks: a second bias a layer and that of the output.
    Reference("rnn", 10000, CAUSAL, 8_330_800 - 400 - 10_000, "torch.nn.RNN", "none given"),
    Reference("lstm_medium", 10000, CAUSAL, 19_780_400 - 2 * 4 * 650 - 10_000, "torch.nn.LSTM", "none given"),
    Reference("lstm_large", 10000, CAUSAL, 66_034_000 - 2 * 4 * 1500 - 10_000, "torch.nn.LSTM", "none given"),
    Reference("elmo_small", 10000, CAUSAL, 4_734_976 + 2 * 10_000 * 128, "torch.nn.LSTM", "13.6 M"),
    Reference("elmo_medium", 10000, CAUSAL, 18_907_136 + 2 * 10_000 * 256, "torch.nn.LSTM", "28.0 M"),
    Reference("elmo", 10000, CAUSAL, 75_563_008 + 2 * 10_000 * 512, "torch.nn.LSTM", "93.6 M"),
    Reference("gpt2", 50257, NONE, 124_439_808, "GPT2LMHeadModel", "117 M (corrected to 124 M)"),
]


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda it: f"{it.preset}-{it.vocab_size}-{it.source}")
def test_parameter_counts_are_the_references(reference):
    options = ModelOptions(preset=reference.preset, **reference.options)
    config = sizes.model_config(options, reference.vocab_size)
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config, reference.heads)))
    biases = reference.heads.mlm or reference.heads.generator > 0
    unused = (padded_vocabulary(config.vocab_size) - config.vocab_size) * (config.table_width + biases)
    unused += (padded_vocabulary(config.vocab_size) - config.vocab_size) * config.table_width * reference.heads.lm
    if config.norm == "pre_but_first":
        unused += config.width * (1 + config.bias)  # the first layer's norm before attention
    assert count - unused == reference.count


@pytest.mark.parametrize(
    ("preset", "highways", "published"), [("elmo_small", 1, 13.6), ("elmo_medium", 1, 28.0), ("elmo", 2, 93.6)]
)
def test_the_layers_of_elmo_and_convolutions_over_characters_have_the_published_parameters(preset, highways, published):
    """The published counts (allennlp.org/elmo) are without the softmax. Filters and character embeddings are those of
    bin/train_elmo.py of allenai/bilm-tf, and highway layers those of the names of the released files."""
    config = sizes.model_config(ModelOptions(preset=preset), 100)
    layers = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config, NONE)["encoder"]))
    filters = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
    convolutions = 262 * 16 + sum(16 * characters * count + count for characters, count in filters)
    highway = 2 * (2048 * 2048 + 2048)
    projection = (2048 + 1) * config.layer_width
    assert round((layers + convolutions + highways * highway + projection) / 1e6, 1) == published


def test_every_preset_has_a_reference():
    assert {reference.preset for reference in REFERENCES} == set(sizes.PRESETS)


def test_of_bert_heads_are_64_wide_and_the_feed_forward_four_times_the_width():
    for preset in ("tiny", "mini", "small", "medium", "base", "large"):
        config = sizes.model_config(ModelOptions(preset=preset), UNCASED)
        assert config.width == 64 * config.heads
        assert config.feed_forward == 4 * config.width


def test_any_part_of_an_architecture_can_be_set_over_its_preset():
    architecture = {item.name: item.type for item in dataclasses.fields(ModelConfig)}
    del architecture["vocab_size"], architecture["lora"]  # of the vocabulary, and of fine-tuning
    options = {item.name: item.type for item in dataclasses.fields(ModelOptions)}
    for name, kind in architecture.items():
        assert options[name] == kind | None, name
        assert getattr(ModelOptions(), name) is None, name
    changed = sizes.model_config(
        ModelOptions(preset="tiny", norm="pre", gated=True, tied_output=False, feed_forward=300), UNCASED
    )
    plain = sizes.model_config(ModelOptions(preset="tiny"), UNCASED)
    assert changed == dataclasses.replace(plain, norm="pre", gated=True, tied_output=False, feed_forward=300)


def test_options_override_the_preset_and_attention_dropout_follows_dropout():
    config = sizes.model_config(ModelOptions(preset="tiny", max_positions=64, dropout=0.0), 100)
    assert (config.max_positions, config.dropout, config.attention_dropout) == (64, 0.0, 0.0)
    config = sizes.model_config(ModelOptions(preset="tiny", attention_dropout=0.0), 100)
    assert (config.max_positions, config.dropout, config.attention_dropout) == (512, 0.1, 0.0)


@pytest.mark.parametrize(
    ("preset", "given", "needed"),
    [
        ("tiny", {"global_every": 3}, "model.window"),
        ("tiny", {"window": 16}, "model.global_every of 2 or more"),
        ("tiny", {"rotary_base": 160_000.0}, "model.positions=rotary"),
        ("modernbert_base", {"rotary_base_local": 500.0, "window": 0}, "rotary positions, model.window"),
        ("tiny", {"rotary_base_local": 500.0, "window": 16, "global_every": 3}, "rotary positions, model.window"),
        ("tiny", {"relative_distance": 16}, "model.relative"),
        ("roberta_base", {"positions": "rotary", "position_offset": 2}, "model.positions=learned"),
    ],
)
def test_a_field_without_effect_is_refused_with_what_it_needs(preset, given, needed):
    with pytest.raises(UserError, match=rf"model\.\w+ is [\d.]+, which has no effect without {needed}") as caught:
        sizes.model_config(ModelOptions(preset=preset, **given), 100)
    assert "\n" not in str(caught.value)


def test_fields_with_an_effect_and_those_that_the_preset_sets_are_kept():
    for preset, given in (
        ("tiny", {"window": 16, "global_every": 3}),
        ("tiny", {"global_every": 1, "rotary_base": 10_000.0, "position_offset": 0}),
        ("modernbert_base", {"window": 16}),
        ("modernbert_base", {"rotary_base_local": 500.0}),
        ("modernbert_base", {"window": 0}),  # the preset's global_every has no effect, but is not the recipe's
        ("roberta_base", {"positions": "rotary", "rotary_base": 500.0}),
        ("feed_forward_lm", {"encoder": FeedForward(window=5)}),
    ):
        model = sizes.model_config(ModelOptions(preset=preset, **given), 100)
        assert {name: getattr(model, name) for name in given} == given
    RELATIVE.append("mine")  # as an extension does
    assert sizes.model_config(ModelOptions(preset="tiny", relative="mine", relative_distance=16), 100).relative
    RELATIVE.remove("mine")


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(UserError, match=r"unknown config\.model\.preset 'huge'; choose from tiny, mini"):
        sizes.model_config(ModelOptions(preset="huge"), 100)
