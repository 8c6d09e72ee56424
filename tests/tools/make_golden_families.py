"""Writes golden arrays of ModernBERT and GPT-2; see make_golden.py for the environment and the keys.

    golden_env/bin/python tests/tools/make_golden_families.py --output tests/testdata

Sizes are unusual, windows are shorter than the rows, and each type of attention layer has its own rotary base. Each
file has labels, the loss and its gradients, except modernbert_cls.npz and modernbert_tagging.npz, which only have
logits.
"""

import argparse
import pathlib

import torch
import transformers
from make_golden import IGNORED, hidden_states, inputs_of, randomize, write

MODERNBERT = {
    "vocab_size": 47,
    "hidden_size": 18,
    "num_attention_heads": 3,
    "intermediate_size": 23,
    "max_position_embeddings": 31,
    "local_attention": 8,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
    "attn_implementation": "eager",
}


def modernbert_inputs(config: transformers.ModernBertConfig, lengths: list[int], length: int, seed: int) -> dict:
    inputs = inputs_of(config, lengths, length, seed)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def modernbert_mlm(path: pathlib.Path) -> None:
    """Writes ModernBertForMaskedLM: layers 0 and 3 have global attention, the others see 4 positions on each side."""
    config = transformers.ModernBertConfig(num_hidden_layers=5, global_attn_every_n_layers=3, **MODERNBERT)
    assert config.layer_types == ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"]
    model = transformers.ModernBertForMaskedLM(config).train()
    randomize(model, seed=51)
    inputs = modernbert_inputs(config, lengths=[23, 6, 17], length=23, seed=52)
    generator = torch.Generator().manual_seed(53)
    chosen = (torch.rand(inputs["input_ids"].shape, generator=generator) < 0.25) & (inputs["attention_mask"] == 1)
    labels = torch.where(chosen, torch.randint(0, 47, chosen.shape, generator=generator), IGNORED)
    output = model(**inputs, labels=labels, output_hidden_states=True)
    output.loss.backward()
    outputs = hidden_states(output) | {"mlm_logits": output.logits, "loss": output.loss}
    write(path, model, inputs | {"labels": labels}, outputs)


def modernbert_classification(path: pathlib.Path, pooling: str, *, gradients: bool) -> None:
    """Writes ModernBertForSequenceClassification with three labels."""
    config = transformers.ModernBertConfig(
        num_hidden_layers=2, global_attn_every_n_layers=2, num_labels=3, classifier_pooling=pooling, **MODERNBERT
    )
    model = transformers.ModernBertForSequenceClassification(config).train()
    randomize(model, seed=54)
    inputs = modernbert_inputs(config, lengths=[7, 13], length=13, seed=55)
    labels = torch.tensor([2, 0])
    output = model(**inputs, labels=labels, output_hidden_states=True)
    outputs = hidden_states(output) | {"logits": output.logits, "loss": output.loss}
    if gradients:
        output.loss.backward()
    write(path, model, inputs | {"labels": labels}, outputs)


def modernbert_tagging(path: pathlib.Path) -> None:
    """Writes ModernBertForTokenClassification with five tags and with biases, which no published ModernBERT has."""
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
    config = transformers.ModernBertConfig(
        num_hidden_layers=2, global_attn_every_n_layers=2, num_labels=5, **MODERNBERT, **biases
    )
    model = transformers.ModernBertForTokenClassification(config).train()
    randomize(model, seed=56)
    inputs = modernbert_inputs(config, lengths=[11, 4], length=11, seed=57)
    output = model(**inputs, output_hidden_states=True)
    write(path, model, inputs, hidden_states(output) | {"logits": output.logits})


def gpt2(path: pathlib.Path) -> None:
    """Writes GPT2LMHeadModel, tied; the label of a position is the next token, unless that is padding."""
    config = transformers.GPT2Config(
        vocab_size=53,
        n_embd=20,
        n_layer=3,
        n_head=4,
        n_inner=27,
        n_positions=19,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=2,
        eos_token_id=3,
        use_cache=False,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).train()
    randomize(model, seed=61)
    inputs = inputs_of(config, lengths=[17, 5, 11], length=17, seed=62)
    inputs.pop("token_type_ids")
    labels = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], IGNORED)
    output = model(**inputs, labels=labels, output_hidden_states=True)
    output.loss.backward()
    outputs = hidden_states(output) | {"lm_logits": output.logits, "loss": output.loss}
    write(path, model, inputs | {"labels": labels}, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    modernbert_mlm(folder / "modernbert_mlm.npz")
    modernbert_classification(folder / "modernbert_mean.npz", "mean", gradients=True)
    modernbert_classification(folder / "modernbert_cls.npz", "cls", gradients=False)
    modernbert_tagging(folder / "modernbert_tagging.npz")
    gpt2(folder / "gpt2.npz")


if __name__ == "__main__":
    main()
