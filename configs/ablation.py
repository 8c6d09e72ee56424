r"""BERT-Base without next sentence prediction, or without bidirectionality (Devlin et al. 2019, section 5.1).

    bert-jax pretrain --config ablation:ltr --workdir runs/ltr --config.data.train=SHARDS_128 \
        --config.data.phases="{900000: 'SHARDS_512'}"

or ablation:no_nsp. Everything else is that of the recipe bert_base, whose SHARDS serve: no_nsp ignores their
labels ("No NSP"), and ltr also ignores their masks and predicts every token from those before it ("LTR & No NSP").
Fine-tuned, ltr keeps its left-to-right attention, as in the paper; set --config.task.pooling=mean, because the first
token sees no other. "+ BiLSTM" is a randomly initialized BiLSTM on top, here for tags, on frozen vectors:
`bert-jax features --checkpoint runs/ltr --config tagging --head bilstm`.

Hardware  not published for these models; not run here
Hours     not published
Expected  published: on dev, MNLI-m, QNLI, MRPC and SST-2 accuracy, and SQuAD 1.1 F1 (table 5); not measured here
              BERT-Base       84.4  88.4  86.7  92.7  88.5
              No NSP          83.9  84.9  86.5  92.6  87.9
              LTR & No NSP    82.1  84.3  77.5  92.1  77.8
              + BiLSTM        82.1  84.1  75.7  91.6  84.9
Source    Devlin et al. 2019, section 5.1 and table 5: the data, the hyperparameters and the fine-tuning of BERT-Base
"""

import ml_collections

from bert_jax.config import MaskedLM, recipe_module
from bert_jax.errors import UserError

MODELS = ("ltr", "no_nsp")


def get_config(model: str = "ltr") -> ml_collections.ConfigDict:
    if model not in MODELS:
        raise UserError(f"ablation: unknown model {model}; choose from {', '.join(MODELS)}")
    config = recipe_module("bert_base").get_config()
    if model == "ltr":
        config.model.causal = True
    else:
        config.objective = MaskedLM(next_sentence=False)
    return config
