"""Writes the golden arrays of RoBERTa and XLM-R, and of BERT's question and multiple-choice heads.

See make_golden.py for the keys and the environment:

    golden_env/bin/python tests/tools/make_golden_roberta.py --output tests/testdata

Additional keys: inputs/start_positions, inputs/end_positions, inputs/labels; outputs/start_logits,
outputs/end_logits. The inputs of multiple choice are i64[B,C,T], C choices per question.
"""

import argparse
import pathlib

import torch
import transformers
from make_golden import IGNORED, config_of, hidden_states, inputs_of, randomize, write

SPECIAL = 4  # <s> <pad> </s> <unk>: words have this id or a larger one


def roberta_config(kind: type, **sizes: int) -> transformers.PretrainedConfig:
    """Returns a configuration without dropout, with the ids and the position offset of 2 of the published models."""
    return kind(
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        layer_norm_eps=1e-5,
        **sizes,
    )


def roberta_inputs(config: transformers.PretrainedConfig, lengths: list[int], length: int, seed: int) -> dict:
    """Returns rows of the given lengths, padded to `length` with the padding token; this family has no token types."""
    generator = torch.Generator().manual_seed(seed)
    attended = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(SPECIAL, config.vocab_size, (len(lengths), length), generator=generator)
    return {"input_ids": torch.where(attended == 1, ids, config.pad_token_id), "attention_mask": attended}


def run(path: pathlib.Path, model: transformers.PreTrainedModel, inputs: dict, labels: dict, logits: list[str]) -> None:
    """Runs one forward and backward pass; writes hidden states, these logits, loss and gradients."""
    output = model.train()(**inputs, **labels, output_hidden_states=True)
    output.loss.backward()
    outputs = hidden_states(output) | {name: output[name] for name in logits} | {"loss": output.loss}
    write(path, model, inputs | labels, outputs)


def masked_lm(path: pathlib.Path) -> None:
    """Writes RobertaForMaskedLM."""
    config = roberta_config(
        transformers.RobertaConfig,
        vocab_size=83,
        hidden_size=18,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=31,
        max_position_embeddings=23,
    )
    model = transformers.RobertaForMaskedLM(config)
    randomize(model, seed=11)
    inputs = roberta_inputs(config, lengths=[17, 6, 21], length=21, seed=12)
    generator = torch.Generator().manual_seed(13)
    chosen = (torch.rand(inputs["input_ids"].shape, generator=generator) < 0.25) & (inputs["attention_mask"] == 1)
    targets = torch.randint(0, config.vocab_size, chosen.shape, generator=generator)
    run(path, model, inputs, {"labels": torch.where(chosen, targets, IGNORED)}, ["logits"])


def classification(path: pathlib.Path) -> None:
    """Writes XLMRobertaForSequenceClassification with three labels: its head is a pooler and a classifier."""
    config = roberta_config(
        transformers.XLMRobertaConfig,
        vocab_size=61,
        hidden_size=15,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=22,
        max_position_embeddings=15,
        num_labels=3,
    )
    model = transformers.XLMRobertaForSequenceClassification(config)
    randomize(model, seed=14)
    run(path, model, roberta_inputs(config, [5, 11], 11, seed=15), {"labels": torch.tensor([2, 0])}, ["logits"])


def tagging(path: pathlib.Path) -> None:
    """Writes RobertaForTokenClassification with four tags."""
    config = roberta_config(
        transformers.RobertaConfig,
        vocab_size=59,
        hidden_size=14,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=19,
        max_position_embeddings=12,
        num_labels=4,
    )
    model = transformers.RobertaForTokenClassification(config)
    randomize(model, seed=16)
    inputs = roberta_inputs(config, [9, 4, 1], 9, seed=17)
    tags = torch.randint(0, 4, (3, 9), generator=torch.Generator().manual_seed(18))
    run(path, model, inputs, {"labels": torch.where(inputs["attention_mask"] == 1, tags, IGNORED)}, ["logits"])


# The reference's loss includes padding, whose hidden states are meaningless, so these rows have none.
ANSWERS = {"start_positions": torch.tensor([2, 0, 7]), "end_positions": torch.tensor([4, 0, 7])}


def roberta_question(path: pathlib.Path) -> None:
    """Writes RobertaForQuestionAnswering."""
    config = roberta_config(
        transformers.RobertaConfig,
        vocab_size=53,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        max_position_embeddings=16,
    )
    model = transformers.RobertaForQuestionAnswering(config)
    randomize(model, seed=19)
    run(path, model, roberta_inputs(config, [13, 13, 13], 13, seed=20), ANSWERS, ["start_logits", "end_logits"])


def bert_question(path: pathlib.Path) -> None:
    """Writes BertForQuestionAnswering."""
    config = config_of(
        vocab_size=53,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        max_position_embeddings=14,
    )
    model = transformers.BertForQuestionAnswering(config)
    randomize(model, seed=21)
    run(path, model, inputs_of(config, [13, 13, 13], 13, seed=22), ANSWERS, ["start_logits", "end_logits"])


def by_choice(inputs: dict[str, torch.Tensor], choices: int) -> dict[str, torch.Tensor]:
    return {name: value.reshape(-1, choices, value.shape[-1]) for name, value in inputs.items()}


def roberta_choices(path: pathlib.Path) -> None:
    """Writes RobertaForMultipleChoice: two questions of three choices."""
    config = roberta_config(
        transformers.RobertaConfig,
        vocab_size=47,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=21,
        max_position_embeddings=13,
    )
    model = transformers.RobertaForMultipleChoice(config)
    randomize(model, seed=23)
    inputs = by_choice(roberta_inputs(config, [11, 3, 7, 8, 9, 4], 11, seed=24), 3)
    run(path, model, inputs, {"labels": torch.tensor([2, 0])}, ["logits"])


def bert_choices(path: pathlib.Path) -> None:
    """Writes BertForMultipleChoice: three questions of two choices."""
    config = config_of(
        vocab_size=47,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=21,
        max_position_embeddings=12,
    )
    model = transformers.BertForMultipleChoice(config)
    randomize(model, seed=25)
    inputs = by_choice(inputs_of(config, [11, 3, 7, 8, 9, 4], 11, seed=26), 2)
    run(path, model, inputs, {"labels": torch.tensor([1, 0, 1])}, ["logits"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    masked_lm(folder / "roberta_masked_lm.npz")
    classification(folder / "xlm_roberta_classification.npz")
    tagging(folder / "roberta_tagging.npz")
    roberta_question(folder / "roberta_question.npz")
    roberta_choices(folder / "roberta_choices.npz")
    bert_question(folder / "bert_question.npz")
    bert_choices(folder / "bert_choices.npz")


if __name__ == "__main__":
    main()
