from nanovllm.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5: biased q, k and v projections, an unbiased o (`ModelConfig.qkv_bias`)."""
