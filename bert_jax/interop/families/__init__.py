"""The model families with a known Hugging Face format, one module each."""

from bert_jax.interop.families.bert import BERT
from bert_jax.interop.families.gpt2 import GPT2
from bert_jax.interop.families.modernbert import MODERNBERT
from bert_jax.interop.families.roberta import ROBERTA, XLM_ROBERTA
from bert_jax.interop.family import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (BERT, ROBERTA, XLM_ROBERTA, MODERNBERT, GPT2)}
