from nanovllm.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 2 and 3.x, SmolLM2: the plain decoder, with optional biases and rotary scaling."""


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral without a sliding window: the plain decoder."""
