"""Transformers as a source of layers, blocks, networks, and of the token clouds that enter them.

The weights are read into maps of measures; the model itself only makes their inputs. Calling the
model's own attention modules instead would be silently wrong: called alone, GPT-2's is not causal
in its plain implementation, and BERT's never is.

Encoders: BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT; of images ViT. Decoders: GPT-2, GPT-NeoX
(Pythia), Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2. From memory also
`torch.nn.TransformerEncoder` and its layers. Every block is compared with the model's own when it
is read. To add a type, write a file beside theirs that makes a `Family` and name it in
``registry.py``: where the blocks of a model are, its attention as
`meanfield.attention.SelfAttention`, and its block as a `meanfield.layers.Chain`. What families
share is in ``modules.py``; ``llama.py`` is a good start for a decoder.

Needs the extra ``models`` (transformers). Nothing is downloaded unless asked for.
"""

from meanfield.pretrained.loading import load, read
from meanfield.pretrained.transformer import Transformer

__all__ = ["Transformer", "load", "read"]
