from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers.processors import TemplateProcessing

from nanovllm.loader.gguf_file import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file carries, with its chat template.

    Made by the generic class: AutoTokenizer of transformers 4 takes LlamaTokenizerFast for every llama file, which
    splits text as SentencePiece does whatever the file says. The generic one leaves two things to us: which tokens
    begin and end a text, and whether to put the first before every prompt.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    metadata = GgufFile(path).metadata
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer
