"""Transformers as a source of layers, blocks, networks, and of the token clouds that enter them.

The weights are read into maps of measures; the model itself only makes their inputs. Calling the
model's own attention modules instead would be silently wrong: called alone, GPT-2's is not causal
in its plain implementation, and BERT's never is.

Encoders: BERT, RoBERTa, XLM-R, DistilBERT, ELECTRA, ALBERT; of images ViT. Decoders: GPT-2,
GPT-NeoX (Pythia), Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3 (text), OLMo 2, Phi 3; attention of
the mixtures of experts gpt-oss, Mixtral and Qwen3-MoE. From memory also
`torch.nn.TransformerEncoder` and its layers. Every block is compared with the model's own when it
is read. How to add a type stands in ``family.py``.

Needs the extra ``models`` (transformers). Nothing is downloaded unless asked for.
"""

from meanfield.habits import hint_names
from meanfield.pretrained.loading import load, read
from meanfield.pretrained.transformer import Transformer

__all__ = ["Transformer", "load", "read"]
hint_names(__name__, __all__)
