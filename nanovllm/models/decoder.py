"""The dense decoder that Qwen3, Qwen2, Llama and Mistral share; ModelConfig says where they differ."""

from torch import Tensor, nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.decode_linear import HalfNormed, add_and_norm, decode_product, is_decode_product
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layer import Layer
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config import ModelConfig


class DecoderAttention(Layer):
    """Normed hidden states -> what o_proj projects, which the layer adds to the residual stream."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        heads = config.num_q_heads, config.num_kv_heads
        self.qkv_proj = QKVParallelLinear(config.hidden_size, config.head_dim, *heads, config.qkv_bias, config.dtype)
        q = self.qkv_proj.weight.shards["q"]
        self.o_proj = RowParallelLinear(q, config.hidden_size, config.o_bias, config.dtype, reduce=False)
        heads = self.qkv_proj.num_q_heads, self.qkv_proj.num_kv_heads  # this rank's
        self.attn = Attention(*heads, config.head_dim, config.rms_norm_eps, rotary_emb, config.dtype)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.dtype)
        self.qk_norm = config.qk_norm

    def forward(self, positions: Tensor, hidden_states: Tensor | HalfNormed) -> Tensor:
        # The norms of q and k run inside the rotary operator: only their weights are used here.
        weights = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm else ()
        return self.attn(self.qkv_proj(hidden_states), positions, *weights)


class DecoderMLP(Layer):
    """Normed hidden states -> what down_proj projects, which the layer adds to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [size, size], config.mlp_bias, config.dtype)
        self.down_proj = RowParallelLinear(size, hidden_size, config.mlp_bias, config.dtype, reduce=False)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor | HalfNormed) -> Tensor:
        layer = self.gate_up_proj
        if is_decode_product(x.shape[0], layer.weight, layer.workspace):
            return decode_product(x, layer.weight, layer.bias, layer.workspace, silu_and_mul=True)
        return self.act_fn(layer(x))


class DecoderLayer(Layer):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(config, rotary_emb)
        self.mlp = DecoderMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor | HalfNormed,
        residual: Tensor,
        next_norm: RMSNorm,
        reader: LinearBase | None,
    ) -> Tensor | HalfNormed:
        """From the normed residual stream to its next norm, which `reader` reads (None: no linear layer).

        residual [T, hidden] gets the outputs of attention and MLP added in place.
        """
        x = self.self_attn(positions, hidden_states)
        norm = self.post_attention_layernorm
        x = add_and_norm(x, self.self_attn.o_proj, residual, norm, self.mlp.gate_up_proj)
        return add_and_norm(self.mlp(x), self.mlp.down_proj, residual, next_norm, reader)


class DecoderModel(Layer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rotary_emb = RotaryEmbedding(config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, config.dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, rotary_emb) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        residual, hidden_states = self.embed_tokens.forward_and_norm(input_ids, self.layers[0].input_layernorm)
        layers = list(self.layers)
        for layer, following in zip(layers, [*layers[1:], None]):
            if following is None:
                norm, reader = self.norm, None
            else:
                norm, reader = following.input_layernorm, following.self_attn.qkv_proj
            hidden_states = layer(positions, hidden_states, residual, norm, reader)
        return hidden_states


class DecoderForCausalLM(Layer):
    """A decoder with its head. Parameters are uninitialised: fill them with nanovllm.loader.

    Build it within `torch.device(...)` to place it, and call it within `set_context(...)`.
    """

    packed_modules_mapping = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, config.dtype, tied_to)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, hidden] after the last norm, of token ids [T] int64 at positions [T] int64."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of hidden states [rows, hidden]."""
        return self.lm_head(hidden_states)
