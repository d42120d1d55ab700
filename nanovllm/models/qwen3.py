from nanovllm.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3: an RMS norm over each head of q and k before they are rotated (`ModelConfig.qk_norm`)."""
