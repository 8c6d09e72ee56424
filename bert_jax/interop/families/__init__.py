"""The model families with a known Hugging Face format, one module each."""

from bert_jax.interop.families.albert import ALBERT
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.families.distilbert import DISTILBERT
from bert_jax.interop.families.electra import ELECTRA
from bert_jax.interop.families.gpt2 import GPT2
from bert_jax.interop.families.modernbert import MODERNBERT
from bert_jax.interop.families.mpnet import MPNET
from bert_jax.interop.families.roberta import ROBERTA, XLM_ROBERTA

_ALL = (BERT, ROBERTA, XLM_ROBERTA, MODERNBERT, GPT2, DISTILBERT, MPNET, ALBERT, ELECTRA)
FAMILIES = {family.model_type: family for family in _ALL}
