"""Tests of fill_mask: the predictions are the model's own, and sentences without a mask or a head are refused."""

import copy
import dataclasses
import json
import re

import jaxtyping
import numpy as np
import pytest
import scipy.stats
import tokenizers
from families import FAMILIES
from random_checkpoints import SPECIAL, odd_config, random_checkpoint
from tokenizer_kinds import make

from bert_jax.commands import fill_mask as commands_fill_mask
from bert_jax.errors import UserError
from bert_jax.interop import huggingface_export
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import fill_mask
from bert_jax.tasks.fill_mask import MASK
from bert_jax.tokenization import tokenizer
from bert_jax.train import sharding


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("vocabulary"), odd_config())


def biased(loaded, token, amount=100):
    """The model with a bias towards a token in its head."""
    bias = loaded.params["mlm_head/bias"].copy()
    bias[loaded.vocabulary.token_id(token)] += amount
    return dataclasses.replace(loaded, params={**loaded.params, "mlm_head/bias": bias})


def test_probabilities_cover_the_vocabulary_and_decrease(loaded):
    sentences = ["the [MASK] sat on the [MASK].", "a [MASK]"]
    filled = fill_mask.fill_mask(loaded, sentences, top=loaded.vocabulary.vocab_size)
    assert [item.sentence for item in filled] == sentences
    assert [len(item.masks) for item in filled] == [2, 1]
    for predictions in filled[0].masks + filled[1].masks:
        values = np.array([prediction.probability for prediction in predictions])
        assert abs(values.sum() - 1) < 1e-5 and (np.diff(values) <= 0).all()
        assert len({prediction.token for prediction in predictions}) == loaded.vocabulary.vocab_size


def test_sentences_are_any_strings_of_a_caller(loaded, monkeypatch):
    sentences = ["a [MASK]", "the [MASK] sat"]
    assert fill_mask.fill_mask(loaded, iter(sentences)) == fill_mask.fill_mask(loaded, sentences)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in a user's program
    for given, said in (
        (["a [MASK]", float("nan")], "text 2 is nan; expected a string"),
        ([("a [MASK]", "b")], r"text 1 is \('a \[MASK\]', 'b'\); expected a string"),
        (None, "texts is None; expected a list of texts"),
        ("a [MASK]", r"texts is the text 'a \[MASK\]'; expected a list of texts"),
    ):
        with pytest.raises(UserError, match=said):
            fill_mask.fill_mask(loaded, given)
        with pytest.raises(UserError, match=said):
            fill_mask.generate(loaded, 1, given)


def test_other_sentences_in_the_call_change_nothing(loaded):
    alone = fill_mask.fill_mask(loaded, ["a [MASK]"])[0]
    among = fill_mask.fill_mask(loaded, ["the [MASK] sat on the [MASK] and [MASK] .", "a [MASK]"])[1]
    assert [prediction.token for prediction in alone.masks[0]] == [prediction.token for prediction in among.masks[0]]
    probabilities = [[prediction.probability for prediction in item.masks[0]] for item in (alone, among)]
    np.testing.assert_allclose(*probabilities, rtol=1e-5)


def test_a_mask_is_written_for_any_vocabulary(loaded, tmp_path):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "a", "Ġ", "Ġa", "<mask>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n\u0120 a\n", encoding="utf-8")
    words = tokenizer.load(tmp_path)
    sizes = dataclasses.replace(loaded.model, vocab_size=8)
    bpe = random_checkpoint(tmp_path / "other", sizes)
    bpe = dataclasses.replace(bpe, vocabulary=words)
    ours, theirs = fill_mask.fill_mask(bpe, ["a [MASK] a", "a <mask> a"], top=8)
    assert {prediction.token for prediction in ours.masks[0]} == set(tokens)
    assert [prediction.token for prediction in ours.masks[0]] == [prediction.token for prediction in theirs.masks[0]]


@pytest.mark.parametrize("kind", ["wordpiece_cased", "bpe", "unigram", "unigram_albert", "sentencepiece_bpe"])
def test_every_kind_of_tokenizer_finds_its_masks(tmp_path, sample_text, kind):
    """The head is made to say, at a mask, the token that follows: so masks and what stands about them are found."""
    make(kind, sample_text.read_text().splitlines()[:200], tmp_path)
    words = tokenizer.load(tmp_path)
    [following] = words.tokens(words.encode("the whole of it")[2:3])
    own = words.roles.mask_token
    sentences = [f"the whole {MASK} it was", f"the whole {own} it was", f"{MASK} it {own}"]
    library = tokenizers.Tokenizer.from_file(str(saved(words, tmp_path / "saved")))
    for sentence in sentences:
        ids = words.encode_special(sentence.replace(MASK, own)).tolist()
        assert ids == library.encode(sentence.replace(MASK, own), add_special_tokens=False).ids
    sizes = odd_config(vocab_size=words.vocab_size, layers=1)
    loaded = dataclasses.replace(random_checkpoint(tmp_path / "model", sizes), vocabulary=words)
    filled = fill_mask.fill_mask(biased(loaded, following), sentences, top=3)
    assert [len(item.masks) for item in filled] == [1, 1, 2]
    assert {predictions[0].token for item in filled for predictions in item.masks} == {following}
    assert filled[0].masks == filled[1].masks


def saved(words, folder):
    words.save(folder)
    return folder / "tokenizer.json"


@pytest.mark.parametrize("family", ["", "modernbert", "roberta"])
def test_a_bias_towards_a_word_is_found_in_every_family(tmp_path, family):
    config = dataclasses.replace(FAMILIES[family], layers=1) if family else odd_config()
    loaded = random_checkpoint(tmp_path, config, Heads(mlm=True))
    [predictions] = fill_mask.fill_mask(biased(loaded, "river"), ["the [MASK] sat"])[0].masks
    assert predictions[0].token == "river" and len(predictions) == 5
    assert predictions[0].probability > 0.999


def test_a_generator_is_copied_to_the_device_once(tmp_path, monkeypatch):
    heads = Heads(replaced_tokens=True, generator=10)
    electra = random_checkpoint(tmp_path, odd_config(layers=2, embedding_width=20), heads)
    copied = []
    put = sharding.put
    monkeypatch.setattr(sharding, "put", lambda tree, mesh: copied.append(tree) or put(tree, mesh))
    first = fill_mask.fill_mask(electra, ["a [MASK]"])
    assert len(copied) == 1
    assert fill_mask.fill_mask(electra, ["a [MASK]"]) == first and len(copied) == 1


def test_rows_of_the_table_that_are_no_tokens_are_never_predicted(tmp_path):
    loaded = random_checkpoint(tmp_path, odd_config(vocab_size=140), Heads(mlm=True))
    words = random_checkpoint(tmp_path / "words", odd_config()).vocabulary  # of 131 tokens
    params = loaded.params | {"mlm_head/bias": np.where(np.arange(256) < 131, 0, 50).astype(np.float32)}
    params["mlm_head/bias"] = params["mlm_head/bias"][: len(loaded.params["mlm_head/bias"])]
    larger = dataclasses.replace(loaded, vocabulary=words, params=params)
    [filled] = fill_mask.fill_mask(larger, ["the [MASK] sat"], top=131)
    assert sum(one.probability for one in filled.masks[0]) == pytest.approx(1, abs=1e-4)
    assert len({one.token for one in filled.masks[0]}) == 131
    assert fill_mask.generate(larger, 3, ["the cat"], seed=1)


def test_checkpoints_that_cannot_fill_masks_are_refused(tmp_path, loaded):
    words = dataclasses.replace(loaded, vocabulary=copy.copy(loaded.vocabulary))
    words.vocabulary.has_mask = False  # as GPT-2's
    gpt = random_checkpoint(tmp_path / "gpt", dataclasses.replace(FAMILIES["gpt"], layers=1), Heads(lm=True))
    tagger = random_checkpoint(tmp_path / "tagger", odd_config(), Heads(tags=2))
    for checkpoint, message in (
        (words, "has no mask token"),
        (gpt, "needs a masked language model, but .* predicts next tokens"),
        (tagger, "no masked language model head"),
    ):
        with pytest.raises(UserError, match=message):
            fill_mask.fill_mask(checkpoint, ["the [MASK]"])


def test_a_bias_towards_a_word_is_found(loaded):
    bias = loaded.params["mlm_head/bias"].copy()
    bias[loaded.vocabulary.token_id("river")] += 100
    towards = dataclasses.replace(loaded, params={**loaded.params, "mlm_head/bias": bias})
    [predictions] = fill_mask.fill_mask(towards, ["the [MASK]"])[0].masks
    assert predictions[0].token == "river" and predictions[0].probability > 0.999 and len(predictions) == 5


def test_the_command_prints_sentences_masks_and_percents(tmp_path, loaded, capsys):
    huggingface_export.write(loaded, tmp_path / "hf")
    commands_fill_mask.main(["--checkpoint", str(tmp_path / "hf"), "--top", "2", "the [MASK] [MASK]", "a [MASK]"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the [MASK] [MASK]" and lines[1] == "  mask 1 of 2" and lines[4] == "  mask 2 of 2"
    assert lines[8] == "a [MASK]" and len(lines) == 11 and all(line.endswith("%") for line in lines[9:])


@pytest.mark.parametrize(
    ("sentence", "options", "message"),
    [
        ("the cat", {}, r"no \[MASK\] in 'the cat'"),
        ("[MASK] " * 30, {}, "32 tokens does not fit the model's 24 positions"),
        ("[MASK]", {"top": 0}, "--top is 0; use 1 to 131"),
    ],
)
def test_sentences_that_cannot_be_filled_are_refused(loaded, sentence, options, message):
    with pytest.raises(UserError, match=message):
        fill_mask.fill_mask(loaded, [sentence], **options)


def independent(loaded, shares):
    """The model with one distribution of tokens at every position: logits are the bias of its head."""
    params = {path: np.zeros_like(value) for path, value in loaded.params.items()}
    bias = np.full(params["mlm_head/bias"].shape, -50, np.float32)
    for token, share in shares.items():
        bias[loaded.vocabulary.token_id(token)] = np.log(share)
    return dataclasses.replace(loaded, params={**params, "mlm_head/bias": bias})


SHARES = {"cat": 0.5, "dog": 0.25, "sat": 0.15, "river": 0.1}


@pytest.mark.parametrize(
    ("steps", "temperature"),
    [(1, 1.0), (7, 1.0), *(pytest.param(60, heat, marks=pytest.mark.slow) for heat in (1.0, 0.5))],
)
def test_generated_tokens_follow_the_distribution_of_the_model(loaded, steps, temperature):
    """A chi-squared test at a false-alarm rate of 1e-6 of 2,560 tokens, which are independent for any steps."""
    model = independent(loaded, SHARES | {"[SEP]": 5.0, "[MASK]": 5.0})  # special tokens are never sampled
    texts = fill_mask.generate(model, 20, [""] * 128, steps=steps, seed=3, temperature=temperature)
    tokens = [token for text in texts for token in text.split()]
    assert len(tokens) == 128 * 20 and set(tokens) <= set(SHARES)
    expected = np.array(list(SHARES.values())) ** (1 / temperature)
    counts = [tokens.count(token) for token in SHARES]
    assert scipy.stats.chisquare(counts, len(tokens) * expected / expected.sum()).pvalue > 1e-6


def test_every_mask_is_filled_and_the_prompt_stays(loaded):
    prompts = ["the cat sat on a mat", "a", "", "the [MASK] sat"]
    texts = fill_mask.generate(loaded, 12, prompts, steps=5, seed=1)
    words = tokenizer.Tokenizer(loaded.vocabulary.spec)
    for prompt, text in zip(prompts[:3], texts[:3], strict=True):
        assert text.startswith(prompt)
    assert texts[3].startswith("the ") and not any(token in " ".join(texts) for token in SPECIAL)
    given = words.encode("the cat sat on a mat").astype(np.int32)
    ids = np.array([2, *given, *[4] * 12, 3], np.int32)
    [filled] = fill_mask.unmask(loaded, [ids], steps=40, seed=0)  # more steps than masks
    np.testing.assert_array_equal(filled[ids != 4], ids[ids != 4])
    assert not np.isin(filled[1:-1], loaded.vocabulary.special_ids).any() and len(filled) == len(ids)


def test_a_seed_determines_the_text(loaded):
    prompts = ["a", "the cat"]
    first, again = (fill_mask.generate(loaded, 15, prompts, seed=4) for _ in range(2))
    assert first == again
    assert first != fill_mask.generate(loaded, 15, prompts, seed=5)
    assert fill_mask.generate(loaded, 15, prompts[:1], seed=4) == first[:1]  # another prompt changes nothing
    same = fill_mask.generate(loaded, 15, ["a", "a"], seed=4)
    assert same[0] != same[1]


def test_the_command_generates(tmp_path, loaded, capsys):
    huggingface_export.write(loaded, tmp_path / "hf")
    place = ["--checkpoint", str(tmp_path / "hf")]
    commands_fill_mask.main([*place, "--generate", "9", "--steps", "3", "--seed", "2", "--temperature", "0.7"])
    [alone] = capsys.readouterr().out.splitlines()
    assert alone == fill_mask.generate(loaded, 9, steps=3, seed=2, temperature=0.7)[0]
    commands_fill_mask.main([*place, "--generate", "9", "a cat", "the dog"])
    first, blank, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a cat ") and not blank and second.startswith("the dog ")
    for arguments, message in (
        ([], "give at least one sentence with [MASK], or --generate N"),
        (["--steps", "3", "a [MASK]"], "--steps is an option of generation; add --generate N"),
        (["--top", "2", "--generate", "3"], "--top is for predictions of masks; omit it with --generate"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            commands_fill_mask.main([*place, *arguments])


def test_generation_that_cannot_be_done_is_refused(loaded):
    for new_tokens, options, message in (
        (0, {}, "--generate is 0; use 1 or more tokens"),
        (23, {}, "a text of 25 tokens, with those to generate, does not fit the model's 24 positions"),
        (5, {"steps": 0}, "--steps is 0 and --temperature is 1.0; use 1 or more"),
        (5, {"temperature": 0.0}, r"--temperature is 0\.0; use 1 or more, and a number above 0"),
    ):
        with pytest.raises(UserError, match=message):
            fill_mask.generate(loaded, new_tokens, **options)
