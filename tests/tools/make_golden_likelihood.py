"""Writes pseudo_likelihood.npz: the pseudo-log-likelihood of sequences by transformers; see make_golden.py.

    golden_env/bin/python tests/tools/make_golden_likelihood.py --output tests/testdata

The model is that of bert_pretraining.npz in the same folder. Each ordinary token of each sequence is masked in a call
of its own (Salazar et al. 2020, section 2.3). The keys:

    ids/N            i64[T], [CLS] A [SEP] or [CLS] A [SEP] B [SEP]
    first_length/N   the number of tokens of [CLS] A [SEP]
    log_p/N          f32[T], the log-probability of each token given all others; 0 for special tokens
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers

CLS, SEP, MASK, ORDINARY = 2, 3, 4, 5  # the last: the first id that is not special
LENGTHS = [(5, 4), (6, 0), (1, 3), (7, 0)]  # of A and B without special tokens


def sequences(vocab_size: int) -> list[tuple[np.ndarray, int]]:
    generator = np.random.default_rng(0)
    made = []
    for first, second in LENGTHS:
        ids = [CLS, *generator.integers(ORDINARY, vocab_size, first), SEP]
        pair = [*generator.integers(ORDINARY, vocab_size, second), SEP] if second else []
        made.append((np.array([*ids, *pair]), len(ids)))
    return made


def log_probabilities(model: torch.nn.Module, ids: np.ndarray, first_length: int) -> np.ndarray:
    types = torch.from_numpy((np.arange(len(ids)) >= first_length).astype(np.int64))[None]
    found = np.zeros(len(ids), np.float32)
    for position in np.flatnonzero(ids >= ORDINARY):
        masked = torch.from_numpy(ids.copy())[None]
        masked[0, position] = MASK
        with torch.no_grad():
            logits = model(input_ids=masked, token_type_ids=types).prediction_logits[0, position]
        found[position] = torch.log_softmax(logits, dim=-1)[ids[position]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the folder to write to")
    folder = parser.parse_args().output
    with np.load(folder / "bert_pretraining.npz") as file:
        config = transformers.BertConfig(**json.loads(str(file["config"])))
        weights = {key.removeprefix("weights/"): torch.from_numpy(file[key]) for key in file if "weights/" in key}
    model = transformers.BertForPreTraining(config).eval()
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all("decoder" in key for key in missing.missing_keys), missing
    arrays = {}
    for number, (ids, first_length) in enumerate(sequences(config.vocab_size)):
        found = log_probabilities(model, ids, first_length)
        arrays |= {f"ids/{number}": ids, f"first_length/{number}": np.array(first_length), f"log_p/{number}": found}
    np.savez_compressed(folder / "pseudo_likelihood.npz", **arrays)


if __name__ == "__main__":
    main()
