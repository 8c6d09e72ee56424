"""Writes tokenizers, tiny models and the vectors of texts, and pseudo-likelihoods; see make_golden.py.

    golden_env/bin/python tests/tools/make_golden_texts.py --output tests/testdata

Other golden files start from ids. These (gpt2_texts.npz, mpnet_texts.npz) hold texts and the folder that transformers
saves, so that a test can follow a text from its characters to its vectors:

    files/NAME      the files of the folder; weights/NAME its tensors
    texts, pairs    JSON lists
    ids/N, pair_ids/N, hidden/N   what the tokenizer returns for text or pair N, and the last layer of the model for it
    mask_probabilities   of the model with an MLM head, over the vocabulary at the mask of MASKED

pseudo_likelihood.npz holds the pseudo-log-likelihood of sequences by the model of bert_pretraining.npz in the same
folder. Each ordinary token of each sequence is masked in a call of its own (Salazar et al. 2020, section 2.3):

    ids/N            i64[T], [CLS] A [SEP] or [CLS] A [SEP] B [SEP]
    first_length/N   the number of tokens of [CLS] A [SEP]
    log_p/N          f32[T], the log-probability of each token given all others; 0 for special tokens
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import tokenizers
import torch
import transformers
from make_golden import NAMES, randomize

TEXTS = ["the cat sat on the mat", "A dog, naïve and un-seen!", "river  the\nthe", "x"]
PAIRS = [["the cat", "on a mat."], ["a dog sat", "x"]]
MASKED = "the <mask> sat"
CORPUS = ["the cat sat on the mat", "a dog sat on the cat", "the river and the mat", "un unseen on and"]
MPNET_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", *"abcdehimnorstuvx,.!-"]
MPNET_TOKENS += [f"##{letter}" for letter in "adehinorstv"] + ["the", "cat", "dog", "sat", "on", "mat", "ri", "##ver"]
MPNET_TOKENS += ["<mask>"]


def write_texts(path: pathlib.Path, tokenizer: transformers.PreTrainedTokenizerBase, model: torch.nn.Module) -> None:
    arrays = {"texts": np.array(json.dumps(TEXTS)), "pairs": np.array(json.dumps(PAIRS))}
    for index, text in enumerate(TEXTS):
        inputs = tokenizer(text, return_tensors="pt")
        arrays[f"ids/{index}"] = inputs["input_ids"][0].numpy()
        with torch.no_grad():
            output = model.base_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        arrays[f"hidden/{index}"] = output.last_hidden_state[0].numpy()
    for index, pair in enumerate(PAIRS):
        arrays[f"pair_ids/{index}"] = np.array(tokenizer(*pair)["input_ids"])
    if tokenizer.mask_token:
        inputs = tokenizer(MASKED, return_tensors="pt")
        with torch.no_grad():
            logits = model(input_ids=inputs["input_ids"]).logits[0]
        (place,) = torch.where(inputs["input_ids"][0] == tokenizer.mask_token_id)
        arrays["mask_probabilities"] = torch.softmax(logits[place[0]], dim=-1).numpy()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        for file in pathlib.Path(folder).iterdir():
            if file.suffix in (".json", ".txt"):
                arrays[f"files/{file.name}"] = np.array(file.read_text(encoding="utf-8"))
        tensors = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    np.savez_compressed(path, **arrays, **{f"weights/{name}": tensor for name, tensor in tensors.items()})


def gpt2(path: pathlib.Path) -> None:
    """GPT2Model with byte-level BPE trained on a few words."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS * 5, vocab_size=275, show_progress=False, special_tokens=["<|endoftext|>"])
    content = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in content["merges"]]
    tokenizer = transformers.GPT2Tokenizer(vocab=content["vocab"], merges=merges)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=12, n_layer=2, n_head=3, n_positions=37, attn_implementation="eager"
    )
    model = transformers.GPT2Model(config).eval()
    randomize(model, seed=81)
    write_texts(path, tokenizer, model)


def mpnet(path: pathlib.Path) -> None:
    """MPNetForMaskedLM with WordPiece and the special tokens of published MPNet folders."""
    tokenizer = transformers.MPNetTokenizer(vocab={token: index for index, token in enumerate(MPNET_TOKENS)})
    config = transformers.MPNetConfig(**dict(zip(NAMES, (len(MPNET_TOKENS), 12, 2, 3, 17, 39), strict=True)))
    model = transformers.MPNetForMaskedLM(config).eval()
    randomize(model, seed=82)
    write_texts(path, tokenizer, model)


CLS, SEP, MASK, ORDINARY = 2, 3, 4, 5  # the last: the first id that is not special
LENGTHS = [(5, 4), (6, 0), (1, 3), (7, 0)]  # of A and B without special tokens


def pseudo_likelihood(path: pathlib.Path) -> None:
    with np.load(path.parent / "bert_pretraining.npz") as file:
        config = transformers.BertConfig(**json.loads(str(file["config"])))
        weights = {key.removeprefix("weights/"): torch.from_numpy(file[key]) for key in file if "weights/" in key}
    model = transformers.BertForPreTraining(config).eval()
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all("decoder" in key for key in missing.missing_keys), missing
    generator, arrays = np.random.default_rng(0), {}
    for number, (first, second) in enumerate(LENGTHS):
        start = [CLS, *generator.integers(ORDINARY, config.vocab_size, first), SEP]
        pair = [*generator.integers(ORDINARY, config.vocab_size, second), SEP] if second else []
        ids = np.array([*start, *pair])
        types = torch.from_numpy((np.arange(len(ids)) >= len(start)).astype(np.int64))[None]
        log_p = np.zeros(len(ids), np.float32)
        for position in np.flatnonzero(ids >= ORDINARY):
            masked = torch.from_numpy(ids.copy())[None]
            masked[0, position] = MASK
            with torch.no_grad():
                logits = model(input_ids=masked, token_type_ids=types).prediction_logits[0, position]
            log_p[position] = torch.log_softmax(logits, dim=-1)[ids[position]]
        arrays |= {f"ids/{number}": ids, f"first_length/{number}": np.array(len(start)), f"log_p/{number}": log_p}
    np.savez_compressed(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the folder to write to")
    folder = parser.parse_args().output
    gpt2(folder / "gpt2_texts.npz")
    mpnet(folder / "mpnet_texts.npz")
    pseudo_likelihood(folder / "pseudo_likelihood.npz")


if __name__ == "__main__":
    main()
