"""Metrics of tasks, of retrieval, and of pretrained models on shards."""

import dataclasses
import gzip
import itertools
import json
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
from bert_jax.tasks import evaluation, metrics, retrieval
from bert_jax.tasks.metrics import (
    CLASSIFICATION_METRICS,
    REGRESSION_METRICS,
    TAGGING_METRICS,
    compute_metrics,
    right_ranks,
)
from bert_jax.tasks.retrieval import Nearest, rank_metrics
from bert_jax.tasks.rows import TokenRows
from bert_jax.train.evaluation import lower_is_better
from bert_jax.train.objectives import Likelihood
from data_prep.build import build
from data_prep.build_options import BuildOptions

TRUTH = np.array([1, 1, 1, 1, 0, 0, 0, 1])
GUESS = np.array([1, 1, 0, 1, 0, 1, 0, 0])


def test_errors_of_numbers_follow_their_definitions():
    rng = np.random.default_rng(0)
    truth, guess = rng.normal(size=(2, 50)) * 1000
    found = compute_metrics(REGRESSION_METRICS, ("mse", "rmse", "mae", "r2"), truth, guess)
    error = truth - guess
    mse = float(np.mean(error**2))
    assert found == pytest.approx(
        {"mse": mse, "rmse": mse**0.5, "mae": float(np.mean(abs(error))), "r2": 1 - mse / truth.var()}
    )
    undefined = compute_metrics(REGRESSION_METRICS, ("rmse", "r2"), np.ones(3), np.arange(3.0))
    assert undefined["rmse"] == pytest.approx((2 / 3) ** 0.5) and np.isnan(undefined["r2"])
    assert all(map(lower_is_better, ("mse", "rmse", "mae"))) and not lower_is_better("r2")


def test_classification_metrics_follow_their_definitions():
    right, wrong, missed, rejected = 3, 1, 2, 2  # true and false positives, false and true negatives
    found = compute_metrics(CLASSIFICATION_METRICS, ("matthews_correlation", "accuracy", "f1"), TRUTH, GUESS)
    assert list(found) == ["matthews_correlation", "accuracy", "f1"]
    assert found["accuracy"] == pytest.approx(5 / 8)
    assert found["f1"] == pytest.approx(2 * right / (2 * right + wrong + missed))
    denominator = math.sqrt((right + wrong) * (right + missed) * (rejected + wrong) * (rejected + missed))
    assert found["matthews_correlation"] == pytest.approx((right * rejected - wrong * missed) / denominator)


def test_macro_f1_is_the_mean_of_each_class():
    truth, guess = np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2])
    (found,) = compute_metrics(CLASSIFICATION_METRICS, ("macro_f1",), truth, guess).values()
    assert found == pytest.approx((1 + 0 + 0.8) / 3)


def test_regression_metrics_follow_their_definitions():
    truth, guess = np.array([0.0, 1.0, 2.5, 5.0], np.float32), np.array([0.1, 3.0, 2.0, 9.0], np.float32)
    found = compute_metrics(REGRESSION_METRICS, ("pearson", "spearman"), truth, guess)
    assert found["pearson"] == pytest.approx(np.corrcoef(truth, guess)[0, 1], abs=1e-6)
    assert found["spearman"] == pytest.approx(1 - 6 * (1 + 1) / (4 * 15))  # by differences of ranks


def test_metrics_of_predictions_that_are_no_numbers_are_nan():
    guess = np.array([0.5, math.nan, 1.0], np.float32)
    found = compute_metrics(REGRESSION_METRICS, tuple(REGRESSION_METRICS), np.arange(3, dtype=np.float32), guess)
    assert len(found) == 6 and all(map(math.isnan, found.values()))


def test_entities_count_when_type_and_borders_are_right():
    truth = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "B-ORG", "O"]]
    guess = [["B-PER", "I-PER", "O", "B-ORG"], ["B-ORG", "I-ORG", "O"]]
    found = compute_metrics(TAGGING_METRICS, ("precision", "recall", "f1", "accuracy"), truth, guess)
    assert found == pytest.approx({"precision": 1 / 3, "recall": 1 / 4, "f1": 2 / 7, "accuracy": 5 / 7})


def test_without_a_predicted_entity_the_entity_metrics_are_zero():
    found = compute_metrics(TAGGING_METRICS, ("precision", "recall", "f1"), [["B-PER", "O"]], [["O", "O"]])
    assert set(found.values()) == {0.0}


ONES, MIXED = np.ones(4, np.float32), np.array([0, 1, 0, 1], np.float32)


@pytest.mark.parametrize(
    ("functions", "name", "truth", "guess", "wanted"),
    [
        (CLASSIFICATION_METRICS, "matthews_correlation", ONES, MIXED, np.nan),
        (CLASSIFICATION_METRICS, "matthews_correlation", MIXED, ONES, 0),
        (CLASSIFICATION_METRICS, "f1", ONES * 0, ONES * 0, np.nan),
        (REGRESSION_METRICS, "pearson", MIXED, ONES, np.nan),
        (REGRESSION_METRICS, "spearman", MIXED, ONES, np.nan),
    ],
)
def test_what_is_undefined_is_nan(functions, name, truth, guess, wanted):
    if functions is CLASSIFICATION_METRICS:
        truth, guess = truth.astype(np.int32), guess.astype(np.int32)
    assert compute_metrics(functions, (name,), truth, guess) == pytest.approx({name: wanted}, nan_ok=True)


def test_an_unknown_metric_is_refused():
    with pytest.raises(UserError, match=r"unknown metric 'bleu' for this kind of task; choose from: accuracy"):
        compute_metrics(CLASSIFICATION_METRICS, ("bleu",), TRUTH, GUESS)


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
    loaded = dataclasses.replace(
        a_model(pairs, Heads(lm=True), **CAUSAL), training={"objective": {"kind": "causal", "z_loss": 0.01}}
    )
    measured = evaluation.objective_metrics(loaded, pairs, CONFIG, ROWS)
    assert measured["z_loss"] > 0
    assert measured["loss"] == pytest.approx(measured["lm_loss"] + 0.01 * measured["z_loss"], rel=1e-5)


def test_bounds_of_a_diffusion_model_are_per_token_and_per_word_without_special_tokens(pairs, rows):
    loaded = dataclasses.replace(a_model(pairs, Heads(mlm=True)), training={"objective": {"kind": "diffusion"}})
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
        (Heads(lm=True), CAUSAL, "needs a masked language model, but the model predicts next"),
        (Heads(replaced_tokens=True), {}, "but the model has no masked language model head"),
    ],
)
def test_a_model_without_masked_tokens_has_no_pseudo_perplexity(pairs, heads, changes, message):
    with pytest.raises(UserError, match=message):
        evaluation.measure_pseudo_perplexity(a_model(pairs, heads, **changes), pairs, CONFIG)


def test_a_tokenizer_of_other_shards_is_refused(pairs, tmp_path):
    other = random_checkpoint(tmp_path, odd_config(), Heads(mlm=True))
    with pytest.raises(UserError, match=r"the tokenizer \(hash .* differs from the tokenizer of the shards"):
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


@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_the_nearest_do_not_depend_on_chunks_and_equal_scores_are_in_order(monkeypatch, chunk, k):
    monkeypatch.setattr(retrieval, "QUERIES_AT_ONCE", 4)
    draw = np.random.default_rng(0)
    queries = draw.integers(-2, 3, (9, 3)).astype(np.float32)  # few values, so many equal scores
    documents = draw.integers(-2, 3, (40, 3)).astype(np.float32)
    numbers = draw.permutation(40)
    nearest = Nearest(queries, k)
    for start in range(0, 40, chunk):
        nearest.add(documents[start : start + chunk], numbers[start : start + chunk])
    for row, query in enumerate(queries):
        wanted = sorted(range(40), key=lambda place: (-float(query @ documents[place]), numbers[place]))[:k]
        assert nearest.documents[row].tolist() == numbers[wanted].tolist()
        assert nearest.scores[row].tolist() == [float(query @ documents[place]) for place in wanted]


def test_ranks_count_the_candidates_with_a_higher_score_and_half_of_those_with_the_same(monkeypatch):
    monkeypatch.setattr(metrics, "QUERIES_AT_ONCE", 2)
    queries = np.eye(3, dtype=np.float32)
    candidates = np.array([[1, 0, 3], [2, 0, 2], [2, 5, 1]], np.float32)
    assert right_ranks(queries, candidates, [[1], [2], [2]]).tolist() == [1.5, 1, 3]
    collapsed = right_ranks(np.ones((3, 2), np.float32), np.ones((9, 2), np.float32), [[0], [1], [2]])
    assert collapsed.tolist() == [5, 5, 5]
    # Of several right candidates the best one counts, and the others are no rivals: [2, 3, 1], [0, 0, 5], [3, 2, 1].
    assert right_ranks(queries, candidates, [[1, 2], [2], [1, 2]]).tolist() == [1, 1, 2]


def test_a_score_that_is_not_a_number_counts_against_its_query():
    queries, candidates = np.ones((2, 1), np.float32), np.array([[1], [np.nan], [0]], np.float32)
    assert right_ranks(queries, candidates, [[0], [0]]).tolist() == [2, 2]
    assert min(right_ranks(queries, candidates, [[1], [1]])) >= 3


def test_metrics_of_a_known_ranking():
    hits = {"q1": ["a", "b", "c"], "q2": ["c", "a"], "q3": ["a"], "q4": ["a"]}
    found = rank_metrics(hits, {"q1": {"b", "c", "x"}, "q2": {"c"}, "q3": {"x"}}, cutoffs=(1, 2))
    gain, ideal = 1 / np.log2(3) + 1 / np.log2(4), 1 + 1 / np.log2(3) + 1 / np.log2(4)
    assert found["ndcg@10"] == pytest.approx((gain / ideal + 1 + 0) / 3)
    assert found["mrr@10"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found["recall@1"] == pytest.approx((0 + 1 + 0) / 3)
    assert found["recall@2"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert set(rank_metrics({"q": ["a", "a", "b"]}, {"q": {"a", "b"}}, cutoffs=(2,)).values()) == {1.0}


def test_a_document_that_occurs_twice_counts_once(folder, capsys):
    corpus = [{"_id": "d2", "text": "old"}, {"_id": "d10", "text": "a"}, {"_id": "d10", "text": "a"}]
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines([*corpus, {"_id": "d2", "text": "two"}]).encode()))
    seen: list[str] = []

    def embed(texts, role):
        seen.extend(texts)
        return np.array([[text != "two", 1] for text in texts], np.float32)

    found, counts = retrieval.measure_beir(folder, embed)
    assert found["ndcg@10"] == found["mrr@10"] == found["recall@1"] == 1
    assert counts == {"queries": 1, "documents": 2} and seen == ["first", "a", "two"]
    assert "2 documents of" in capsys.readouterr().err


def equal(texts, role):
    """Vectors with equal scores, which are ordered by identifier."""
    return np.ones((len(texts), 2), np.float32)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "qrels").mkdir()
    corpus = [{"_id": "d2", "title": "T", "text": "two"}, {"_id": "d10", "text": "ten"}, {"_id": "d1", "text": "one"}]
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(lines(corpus).encode()))
    (tmp_path / "queries.jsonl").write_text(lines([{"_id": "q1", "text": "first"}, {"_id": "q9", "text": "unjudged"}]))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td10\t1\nq1\td1\t0\n")
    (tmp_path / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t2\n")
    return tmp_path


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_beir_folder_is_measured(folder, monkeypatch, chunk):
    monkeypatch.setattr(retrieval, "DOCUMENTS_AT_ONCE", chunk)
    seen = []

    def embed(texts, role):
        seen.extend((text, role) for text in texts)
        return equal(texts, role)

    is_beir = map(retrieval.is_beir, (folder, folder / "qrels" / "dev.tsv", folder / "qrels"))
    assert list(is_beir) == [True, True, False]
    metrics, counts = retrieval.measure_beir(folder, embed)
    assert seen == [("first", "query"), ("T two", "document"), ("ten", "document"), ("one", "document")]
    assert (metrics["mrr@10"], metrics["recall@1"], metrics["recall@5"]) == (1 / 2, 0, 1)
    assert counts == {"queries": 1, "documents": 3}
    assert retrieval.measure_beir(folder / "qrels" / "dev.tsv", embed)[0]["mrr@10"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("queries.jsonl", '{"_id": "q7", "text": "x"}\n', "no query of its qrels file is in queries.jsonl"),
        ("queries.jsonl", '{"id": "q1"}\n', "queries.jsonl line 1: expected an object"),
        ("queries.jsonl", '{"_id": 1, "text": "x"}\n', "line 1: expected an object .* whose values are strings"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1 d1 1\n", "test.tsv line 2 is 'q1 d1 1'; expected query-id"),
        ("qrels/test.tsv", "q1\t0\td1\t1\n", r"test.tsv line 1 is 'q1.*'; expected query-id, corpus-id and score"),
        ("qrels/test.tsv", "q1 0 d1 1\n", "test.tsv line 1 is 'q1 0 d1 1'; expected query-id"),
        ("qrels/test.tsv", "q1\td1\tyes\nq1\td1\tno\n", "test.tsv line 2 is"),
    ],
)
def test_files_of_another_form_are_refused(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        retrieval.measure_beir(folder, equal)


def test_a_qrels_file_without_a_header_keeps_its_first_judgment(folder):
    (folder / "qrels" / "test.tsv").write_text("q1\td1\t1.0\nq1\td10\t0\n")
    found, _ = retrieval.measure_beir(folder, equal)
    assert found["recall@1"] == 1


def test_queries_that_are_documents_find_themselves_unless_they_are_left_out(folder, capsys):
    """d1 is the first of equal scores; it is a query, too, whose answer is d10."""
    (folder / "queries.jsonl").write_text(lines([{"_id": "d1", "text": "one"}, {"_id": "q1", "text": "x"}]))
    (folder / "qrels" / "test.tsv").write_text("d1\td10\t1\nq1\td1\t1\n")
    assert retrieval.measure_beir(folder, equal)[0]["mrr@10"] == (1 / 2 + 1) / 2
    assert "1 of 2 queries have the _id of a document" in capsys.readouterr().err
    assert retrieval.measure_beir(folder, equal, skip_self=True)[0]["mrr@10"] == 1
    assert capsys.readouterr().err == ""


def test_several_splits_without_a_usual_name_are_refused(folder):
    for name in ("test", "dev"):
        (folder / "qrels" / f"{name}.tsv").rename(folder / "qrels" / f"{name}2.tsv")
    with pytest.raises(UserError, match="has the splits dev2, test2; name one"):
        retrieval.measure_beir(folder, equal)
