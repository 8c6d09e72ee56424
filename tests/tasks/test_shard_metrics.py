"""Perplexities by token and by word, and pseudo-perplexity, against loops over single sequences and transformers."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from golden import assert_close, open_golden, read_arrays
from random_checkpoints import odd_config, random_checkpoint
from row_tables import Facts, Table, packed_rows

from bert_jax.commands import evaluate
from bert_jax.config import MeshConfig, ModelConfig, TrainConfig
from bert_jax.data import loader, shards
from bert_jax.data.example import Rows, unmasked_ids
from bert_jax.data.masking.masker import token_kinds
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import bind, init_params
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.tokens import generator_config
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import evaluation
from bert_jax.tasks.rows import TokenRows
from bert_jax.train.objectives import Likelihood
from data_prep.build import build
from data_prep.build_options import BuildOptions

CONFIG = TrainConfig(batch_size=16)
ROWS = 3
WORDS = Facts()
CAUSAL = {"causal": True, "norm": "pre", "embedding_norm": False, "segment_types": 0}


@pytest.fixture(scope="module")
def pairs(sample_text, vocab_dir, tmp_path_factory) -> shards.Dataset:
    """Held-out rows of several packed pairs."""
    folder = tmp_path_factory.mktemp("pairs") / "shards"
    options = {"seq_len": 48, "objective": "nsp", "pack": 3, "eval_fraction": 0.3, "short_seq_prob": 0.9}
    build(BuildOptions(sample_text, vocab_dir, folder, workers=1, **options))
    return shards.open_dataset(folder, "eval")


@pytest.fixture(scope="module")
def rows(pairs) -> Rows:
    rows = pairs.gather(np.arange(ROWS))
    assert (rows.sequence_lengths > 0).sum() > ROWS
    assert (rows.first_segment_lengths < rows.sequence_lengths).any()
    return rows


def a_model(pairs: shards.Dataset, heads: Heads, **changes: object) -> LoadedModel:
    words = pairs.vocabulary()
    sizes = {"vocab_size": words.vocab_size, "layers": 1, "width": 20, "heads": 2, "feed_forward": 28}
    config = ModelConfig(**sizes, max_positions=48, initializer_range=0.5, **changes)
    params = jax.device_get(layers.flatten(init_params(config, heads, jax.random.key(0))))
    return LoadedModel(config, heads, params, words, origin="the model")


def sequences(rows: Rows) -> list[tuple[np.ndarray, int]]:
    """The ids of each sequence, and the length of its first segment."""
    ids, found = unmasked_ids(rows), []
    for row in range(len(ids)):
        start = 0
        for length, first in zip(rows.sequence_lengths[row], rows.first_segment_lengths[row], strict=True):
            if length:
                found.append((ids[row, start : start + int(length)].astype(np.int32), int(first)))
            start += int(length)
    return found


def log_probabilities(loaded: LoadedModel, texts: list[tuple[np.ndarray, int]], length: int) -> np.ndarray:
    """f64[texts, length, V] of texts that are in a row of their own each."""
    made = TokenRows(
        input_ids=np.concatenate([ids for ids, _ in texts]),
        offsets=np.cumsum([0, *(len(ids) for ids, _ in texts)], dtype=np.int64),
        first_lengths=np.array([first for _, first in texts], np.int32),
        pad_id=0,
        truncated=0,
    )

    @jax.jit
    def run(params, batch):
        model = bind(loaded.model, loaded.heads, params, Runtime())
        return vocabulary_logits(model, model.encode(batch).last)[..., : loaded.model.vocab_size]

    logits = np.asarray(run(layers.unflatten(loaded.params), made.batch(np.arange(len(texts)), length)), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def masked_in_turn(loaded: LoadedModel, rows: Rows) -> list[float]:
    """log P of every ordinary token, with a row for each of them."""
    words, masked, targets = loaded.vocabulary, [], []
    for ids, first in sequences(rows):
        for position in np.flatnonzero(~np.isin(ids, words.special_ids)):
            changed = ids.copy()
            changed[position] = words.mask_id
            masked.append((changed, first))
            targets.append((position, ids[position]))
    found = log_probabilities(loaded, masked, rows.input_ids.shape[1])
    return [float(one[position, token]) for one, (position, token) in zip(found, targets, strict=True)]


def word_starts(loaded: LoadedModel, rows: Rows) -> int:
    """The ordinary tokens that begin a word by the tokens' text."""
    tokens = [loaded.vocabulary.tokens(ids) for ids, _ in sequences(rows)]
    special = set(loaded.vocabulary.tokens(loaded.vocabulary.special_ids))
    return sum(
        after not in special and (before in special or not after.startswith("##"))
        for text in tokens
        for before, after in itertools.pairwise(text)
    )


def assert_pseudo(measured: dict, log_p: list[float], words: int) -> None:
    wanted = -np.mean(log_p)
    assert measured == {
        "pseudo_loss": pytest.approx(wanted, rel=1e-5),
        "pseudo_perplexity": pytest.approx(math.exp(wanted), rel=1e-4),
        "pseudo_word_perplexity": pytest.approx(math.exp(-sum(log_p) / words), rel=1e-4),
    }


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)])
def test_pseudo_perplexity_of_packed_pairs_equals_a_loop_over_masked_tokens(pairs, rows, mesh):
    loaded = a_model(pairs, Heads(mlm=True, next_sentence=True, pooler=True))
    config = dataclasses.replace(CONFIG, mesh=mesh)
    measured = evaluation.measure_pseudo_perplexity(loaded, pairs, config, ROWS)
    assert_pseudo(measured, masked_in_turn(loaded, rows), word_starts(loaded, rows))


def test_pseudo_perplexity_equals_the_reference(tmp_path):
    """The golden sequences are packed two in a row."""
    golden, arrays = open_golden("bert_pretraining", tmp_path), read_arrays("pseudo_likelihood")
    ids = np.zeros((2, 20), np.uint16)
    lengths, firsts = np.zeros((2, 2, 2), np.uint16)
    for number in range(4):
        row, place = divmod(number, 2)
        sequence = arrays[f"ids/{number}"]
        start = int(lengths[row, 0]) * place
        ids[row, start : start + len(sequence)] = sequence
        lengths[row, place], firsts[row, place] = len(sequence), arrays[f"first_length/{number}"]
    table = Table(Rows(ids, lengths, firsts, np.zeros((2, 2), np.int8), np.zeros((2, 2), np.uint64)))
    table.tokenizer_hash = golden.loaded.vocabulary.content_hash
    measured = evaluation.measure_pseudo_perplexity(golden.loaded, table, CONFIG)
    log_p = np.concatenate([arrays[f"log_p/{number}"] for number in range(4)])
    assert_close(measured["pseudo_loss"], -log_p[log_p < 0].mean(), "pseudo_loss")


@pytest.mark.slow
def test_the_generator_of_two_models_is_measured(pairs, rows):
    both = a_model(pairs, Heads(replaced_tokens=True, generator=10), embedding_width=20)
    shared = {path: value for path, value in both.params.items() if path.startswith("embeddings/")}
    own = {path.removeprefix("generator/"): value for path, value in both.params.items() if path.startswith("gen")}
    own = {f"embeddings/{path}" if path.startswith("projection/") else path: value for path, value in own.items()}
    generator = dataclasses.replace(
        both, model=generator_config(both.model, 10), heads=Heads(mlm=True), params=shared | own
    )
    measured = evaluation.measure_pseudo_perplexity(both, pairs, CONFIG, ROWS)
    assert_pseudo(measured, masked_in_turn(generator, rows), word_starts(both, rows))


def test_every_ordinary_token_is_masked_once_and_nothing_else_changes():
    rows = packed_rows(7)
    masks = loader.SingleMasks(Table(rows), WORDS, 6)
    seen = np.zeros(rows.input_ids.shape, int)
    batches = list(masks.batches(8))
    assert sum((batch.sequence_ids[:, 0] > 0).sum() for batch in batches) == masks.count
    parts = [masks.batches(8, part) for part in (slice(0, 5), np.array([5, 6, 7]))]
    for batch, *halves in zip(batches, *parts, strict=True):
        for whole, *split in zip(batch[:10], *(half[:10] for half in halves), strict=True):
            np.testing.assert_array_equal(whole, np.concatenate(split))
        for copy in np.flatnonzero(batch.sequence_ids[:, 0]):
            text, real = batch.input_ids[copy].copy(), batch.masked_weights[copy] > 0
            places = batch.masked_positions[copy, real]
            assert (text[places] == WORDS.mask_id).all()
            text[places] = batch.masked_ids[copy, real]
            (row,) = np.flatnonzero((rows.input_ids == text).all(axis=1))
            seen[row, places] += 1
            assert len(set(batch.sequence_ids[copy, places])) == len(places)  # at most one in a sequence
    ordinary = ~np.isin(rows.input_ids, WORDS.special_ids)
    np.testing.assert_array_equal(seen, ordinary * (np.arange(7) < 6)[:, None])


def test_words_are_those_that_whole_word_masking_masks(monkeypatch):
    monkeypatch.setattr(loader, "ROWS_AT_ONCE", 3)
    rows = packed_rows(8)
    rows.input_ids[0, 3] = 1  # an unknown token between two ordinary ones
    counted = loader.count_words(Table(rows), WORDS)
    words = ordinary = special = 0
    for ids, _ in sequences(rows):
        for before, after in itertools.pairwise(ids):
            ordinary += after >= 5
            special += after < 5
            words += after >= 5 and (after < 30 or before < 5)
    assert counted == (ordinary, words, special)
    assert loader.count_words(Table(rows), WORDS, 2) != counted
    # Static masks are undone: the masks of the rows do not change the numbers.
    places = np.tile(np.array([1, 2], np.uint16), (8, 1))
    original = np.take_along_axis(rows.input_ids, places.astype(int), axis=1)
    hidden = rows.input_ids.copy()
    np.put_along_axis(hidden, places.astype(int), WORDS.mask_id, axis=1)
    static = rows._replace(
        input_ids=hidden,
        masked_positions=places,
        masked_ids=original,
        masked_counts=np.full(8, 2, np.uint16),
    )
    assert loader.count_words(Table(static, static=True), WORDS) == counted
    assert set(np.flatnonzero(token_kinds(WORDS) == 2)) == set(range(30, 50))


def test_perplexity_of_a_causal_model_equals_a_loop_over_sequences(pairs, rows):
    loaded = a_model(pairs, Heads(lm=True), **CAUSAL)
    measured = evaluation.objective_metrics(loaded, pairs, CONFIG, ROWS)
    texts = sequences(rows)
    found = log_probabilities(loaded, texts, rows.input_ids.shape[1])
    nats = tokens = ends = 0
    for (ids, _), one in zip(texts, found, strict=True):
        nats -= one[np.arange(len(ids) - 1), ids[1:]].sum()
        tokens += len(ids) - 1
        ends += np.isin(ids[1:], loaded.vocabulary.special_ids).sum()
    assert measured["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    words = word_starts(loaded, rows) + ends
    assert measured["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert words < tokens


def test_the_loss_has_the_z_loss_of_the_run(pairs):
    loaded = dataclasses.replace(a_model(pairs, Heads(lm=True), **CAUSAL), training={"z_loss": 0.01})
    measured = evaluation.objective_metrics(loaded, pairs, CONFIG, ROWS)
    assert measured["z_loss"] > 0
    assert measured["loss"] == pytest.approx(measured["lm_loss"] + 0.01 * measured["z_loss"], rel=1e-5)


def test_bounds_of_a_diffusion_model_are_per_token_and_per_word_without_special_tokens(pairs, rows):
    loaded = dataclasses.replace(a_model(pairs, Heads(mlm=True)), training={"objective": "diffusion"})
    measured = evaluation.objective_metrics(loaded, pairs, CONFIG, ROWS)
    tokens = sum((~np.isin(ids, loaded.vocabulary.special_ids)).sum() for ids, _ in sequences(rows))
    assert measured["mdm_perplexity"] == pytest.approx(math.exp(measured["mdm_loss"]))
    per_word = measured["mdm_loss"] * tokens / word_starts(loaded, rows)
    assert measured["mdm_word_perplexity"] == pytest.approx(math.exp(per_word))


def test_perplexities_that_no_number_can_hold_are_null():
    counts = loader.WordCounts(ordinary=10, words=0, special=0)
    assert evaluation.perplexities(800.0, counts, Likelihood("", with_special=True)) == {
        "perplexity": None,
        "word_perplexity": None,
    }


@pytest.mark.parametrize(
    ("heads", "changes", "message"),
    [
        (Heads(lm=True), CAUSAL, "the model is a causal model, whose perplexity is printed without --pseudo_perplex"),
        (Heads(replaced_tokens=True), {}, "the model has no masked language model head, which --pseudo_perplexity"),
    ],
)
def test_a_model_without_masked_tokens_has_no_pseudo_perplexity(pairs, heads, changes, message):
    with pytest.raises(UserError, match=message):
        evaluation.measure_pseudo_perplexity(a_model(pairs, heads, **changes), pairs, CONFIG)


def test_a_tokenizer_of_other_shards_is_refused(pairs, tmp_path):
    other = random_checkpoint(tmp_path, odd_config(), Heads(mlm=True))
    with pytest.raises(UserError, match=r"the tokenizer \(hash .* differs from that of the shards"):
        evaluation.measure_pseudo_perplexity(other, pairs, CONFIG)


def test_the_command_prints_pseudo_perplexity_with_the_other_metrics(pairs, tmp_path, capsys):
    loaded = a_model(pairs, Heads(mlm=True, next_sentence=True, pooler=True))
    export.write(loaded, tmp_path / "export")
    arguments = [f"--checkpoint={tmp_path / 'export'}", f"--data={pairs.directory}", f"--max_rows={ROWS}"]
    evaluate.main([*arguments, "--pseudo_perplexity", "--batch_size=16"])
    printed = capsys.readouterr().out
    assert '"mlm_loss"' in printed and '"nsp_accuracy"' in printed
    found = evaluation.measure_pseudo_perplexity(loaded, pairs, CONFIG, ROWS)
    assert f'"pseudo_perplexity": {found["pseudo_perplexity"]}' in printed
