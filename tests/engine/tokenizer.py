"""Small real tokenizers: byte-level BPE as Qwen's and Llama 3's, trained on a few lines; BPE as SentencePiece's."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = ["the cat sat on the mat and the dog sat on the log", "hello world, hello there", "stop here. stop there."]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Special tokens <eos> (id 0) and <pad> (id 1), the 256 bytes, and merges of common English pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@cache
def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral's: <eos> (id 0), letters with a mark for the space before them, and the 256 bytes
    <0x00> (id 1) to <0xFF> for all other characters."""
    tokens = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.", "he", "▁the", "日"]
    model = models.BPE({t: i for i, t in enumerate([*tokens, "▁t"])}, [("h", "e"), ("▁t", "he")], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
