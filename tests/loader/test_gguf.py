"""GGUF: every supported block type, names, the order of llama's rows, config, and what is refused."""

import dataclasses
import logging
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

import nanovllm.loader.gguf as loader
from nanovllm.layers.rotary import cos_sin_table
from nanovllm.loader.gguf import GgufCheckpoint
from nanovllm.loader.gguf_file import GgufFile
from nanovllm.loader.source import load_generation_config, load_hf_config, load_tokenizer, resolve
from nanovllm.models.config import ModelConfig
from tests.loader.gguf_files import block_bytes, dequantized, finish, permuted, write_model
from tests.loader.memory import load_memory, needs_proc
from tests.loader.test_weights import assert_loaded, load
from tests.real_model import REAL_MODEL, needs_real_model
from tests.tiny import tiny_model

ROWS, COLUMNS = 24, 512
ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
MATRIX = "blk.0.ffn_up.weight"


def random_blocks(quant: GGMLQuantizationType) -> np.ndarray:
    """[ROWS, bytes a row] of valid random blocks: quantised normal numbers, or for the K types random bytes with
    their fp16 scales (Q4_K: bytes 0..3, Q6_K: bytes 208..209) made small and finite."""
    rng = np.random.default_rng(0)
    if not quant.name.endswith("_K"):
        return quantize(rng.standard_normal((ROWS, COLUMNS), np.float32), quant).view(np.uint8)
    size = block_bytes(quant)
    raw = rng.integers(0, 256, (ROWS * COLUMNS // 256, size), np.uint8)
    first, halves = (0, 2) if quant.name == "Q4_K" else (208, 1)
    scales = rng.uniform(0.001, 0.1, (len(raw), halves)).astype(np.float16)
    raw[:, first : first + 2 * halves] = scales.view(np.uint8)
    return raw.reshape(ROWS, -1)


def write_matrix(path: Path, raw: np.ndarray, quant: GGMLQuantizationType, name: str = MATRIX) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=quant)
    finish(writer)
    return path


@pytest.mark.parametrize("chunk", [1 << 22, 5 * COLUMNS], ids=["whole", "chunked"])
@pytest.mark.parametrize("quant", loader._QUANTS, ids=lambda quant: quant.name)
def test_every_block_type(tmp_path, monkeypatch, quant, chunk):
    monkeypatch.setattr(loader, "_CHUNK", chunk)
    raw = random_blocks(quant)
    checkpoint = GgufCheckpoint(write_matrix(tmp_path / "x.gguf", raw, quant))
    assert checkpoint.shapes() == {"model.layers.0.mlp.up_proj.weight": (ROWS, COLUMNS)}
    ((_, tensor),) = checkpoint.tensors(torch.float32)
    expected = torch.from_numpy(dequantized(raw.tobytes(), quant)).view(ROWS, COLUMNS)
    torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)
    ((_, rounded),) = checkpoint.tensors(torch.bfloat16)
    assert torch.equal(rounded, tensor.bfloat16())


@pytest.mark.parametrize("quant", [GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q2_K])
def test_other_block_types_are_refused_by_name(tmp_path, quant):
    raw = np.zeros((ROWS, gguf.quants.quant_shape_to_byte_shape((COLUMNS,), quant)[0]), np.uint8)
    with pytest.raises(ValueError, match=rf"{MATRIX}: expected one of .*Q4_K, Q6_K, got {quant.name}"):
        GgufCheckpoint(write_matrix(tmp_path / "x.gguf", raw, quant))


@pytest.mark.parametrize("module, heads", [("attn_q", 4), ("attn_k", 2), ("attn_v", None)])
def test_llama_rows_return_to_their_order(tmp_path, module, heads):
    plain = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    stored = plain if heads is None else permuted(plain, heads)
    quant = GGMLQuantizationType.F32
    checkpoint = GgufCheckpoint(write_matrix(tmp_path / "x.gguf", stored, quant, f"blk.0.{module}.weight"))
    ((_, tensor),) = checkpoint.tensors(torch.float32)
    assert np.array_equal(tensor.numpy(), plain)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_model(tmp_path, architecture, tied):
    model = tiny_model(architecture, tie_word_embeddings=tied)
    path = write_model(tmp_path / "x.gguf", model)
    config = ModelConfig.from_hf(load_hf_config(resolve(path)))
    expected = ModelConfig.from_hf(model.config)
    assert config == dataclasses.replace(expected, rms_norm_eps=config.rms_norm_eps)
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert_loaded(load(path), model.state_dict())


def test_llama_attention_biases(tmp_path):
    model = tiny_model("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert_loaded(load(write_model(tmp_path / "x.gguf", model)), model.state_dict())


def test_quantised_model_computes_in_float32(tmp_path):
    model = tiny_model("LlamaForCausalLM", hidden_size=128, intermediate_size=128)
    path = write_model(tmp_path / "x.gguf", model, GGMLQuantizationType.Q8_0)
    assert load_hf_config(resolve(path)).dtype == torch.float32
    loaded = load(path, dtype=torch.float32).model.layers[0].self_attn.o_proj.weight
    torch.testing.assert_close(loaded, model.model.layers[0].self_attn.o_proj.weight, atol=0.01, rtol=0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("quant", loader._PACKED_QUANTS, ids=lambda quant: quant.name)
def test_packed_weights_are_the_dense_ones(tmp_path, quant, tied):
    """Shards stacked, llama's rows in their order, and the head's blocks wherever they are."""
    hf = tiny_model("LlamaForCausalLM", tie_word_embeddings=tied, intermediate_size=128)
    model = load(write_model(tmp_path / "x.gguf", hf, quant), dtype=torch.float32)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "packed")}
    assert len(layers) == 4 * model.config.num_layers + 1
    for name, layer in layers.items():
        assert layer.packed.quant_type == quant, name
        values = torch.from_numpy(dequantize(layer.packed.blocks.numpy(), quant))
        assert torch.equal(values, layer.weight), name


def test_layers_of_mixed_or_plain_types_stay_dense(tmp_path):
    quants = {"attn_v": GGMLQuantizationType.Q8_0, "ffn_down": GGMLQuantizationType.F16}
    hf = tiny_model("LlamaForCausalLM", intermediate_size=128)
    path = write_model(tmp_path / "x.gguf", hf, GGMLQuantizationType.Q4_1, quants=quants)
    layer = load(path, dtype=torch.float32).model.layers[0]
    assert layer.self_attn.qkv_proj.packed is None
    assert layer.mlp.down_proj.packed is None
    assert layer.self_attn.o_proj.packed is not None


def test_missing_tensor_is_named(tmp_path):
    model = tiny_model("LlamaForCausalLM")
    model.config.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"9 missing: model\.layers\.3\."):
        load(write_model(tmp_path / "x.gguf", model))


def test_unknown_tensor_is_named(tmp_path):
    extra = {"blk.0.ffn_gate_inp.weight": np.ones(3, np.float32)}
    path = write_model(tmp_path / "x.gguf", tiny_model("LlamaForCausalLM"), extra=extra)
    with pytest.raises(ValueError, match=r"1 unexpected: blk\.0\.ffn_gate_inp\.weight"):
        load(path)


def test_rope_divisors_tensor(tmp_path):
    divisors = np.linspace(1, 8, 32, dtype=np.float32)
    extra = {"rope_freqs.weight": divisors}
    path = write_model(tmp_path / "x.gguf", tiny_model("LlamaForCausalLM"), extra=extra)
    config = ModelConfig.from_hf(load_hf_config(resolve(path)))
    assert config.rope_scaling.freq_divisors == tuple(divisors.tolist())
    load(path)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=["linear", "yarn"],
)
def test_rope_scaling(tmp_path, scaling):
    model = tiny_model("Qwen2ForCausalLM")
    metadata = {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if scaling["rope_type"] == "yarn":
        metadata["rope.scaling.original_context_length"] = 256
    path = write_model(tmp_path / "x.gguf", model, metadata=metadata)
    expected = tiny_model("Qwen2ForCausalLM", rope_scaling=scaling).config
    tables = (cos_sin_table(ModelConfig.from_hf(c)) for c in (load_hf_config(resolve(path)), expected))
    assert torch.equal(*tables)


@pytest.mark.parametrize(
    "metadata, name",
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5},
            "attn_factor",
        ),
        ({"expert_count": 8}, "expert_count"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, metadata, name):
    path = write_model(tmp_path / "x.gguf", tiny_model("LlamaForCausalLM"), metadata=metadata)
    with pytest.raises(NotImplementedError, match=name):
        ModelConfig.from_hf(load_hf_config(resolve(path)))


def test_sliding_window_is_refused(tmp_path):
    metadata = {"attention.sliding_window": 64}
    path = write_model(tmp_path / "x.gguf", tiny_model("LlamaForCausalLM"), metadata=metadata)
    with pytest.raises(ValueError, match="sliding_window"):
        ModelConfig.from_hf(load_hf_config(resolve(path)))


def test_other_architecture(tmp_path):
    writer = GGUFWriter(tmp_path / "x.gguf", "gpt2")
    finish(writer)
    with pytest.raises(ValueError, match=r"general\.architecture: expected one of llama, qwen2, qwen3, got gpt2"):
        load_hf_config(resolve(tmp_path / "x.gguf"))


def test_missing_key_is_named(tmp_path):
    path = write_matrix(tmp_path / "x.gguf", np.zeros((4, 4), np.float32), GGMLQuantizationType.F32)
    with pytest.raises(ValueError, match=r"expected the metadata key llama\.embedding_length"):
        load_hf_config(resolve(path))


def test_eos_ids(tmp_path):
    path = write_model(tmp_path / "x.gguf", tiny_model("LlamaForCausalLM"))
    assert load_generation_config(resolve(path)).eos_token_id == [2, 5]


def test_damaged_files(tmp_path):
    whole = write_model(tmp_path / "x.gguf", tiny_model("LlamaForCausalLM")).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for content, text in (
        (b"", "expected a GGUF file"),
        (b"GGML" + whole[4:], "magic"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "version 2 or 3"),
        (whole[:1000], "expected a GGUF file"),
        (whole[:-100], "truncated"),
    ):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=text):
            GgufFile(damaged)


@needs_real_model
def test_real_header_equals_the_gguf_packages():
    ours, theirs = GgufFile(REAL_MODEL), gguf.GGUFReader(REAL_MODEL)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist()[::-1]) and mine.quant == tensor.tensor_type
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)
    for key, value in ours.metadata.items():
        assert np.array_equal(value, theirs.fields[key].contents()), key


@needs_real_model
def test_real_tokenizer_and_chat_template(caplog):
    caplog.set_level(logging.ERROR)
    source = resolve(REAL_MODEL)
    tokenizer = load_tokenizer(source)
    assert tokenizer.decode(tokenizer("The capital of France is").input_ids) == "The capital of France is"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>").input_ids == load_generation_config(source).eos_token_id == [2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = "\n  Größe,\n\n 日本 12345"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@needs_real_model
def test_begin_of_text_is_added_when_the_file_says_so(tmp_path):
    content = bytearray(REAL_MODEL.read_bytes())
    key = b"tokenizer.ggml.add_bos_token"
    flag = content.index(key) + len(key) + 4  # behind the value's type
    assert content[flag] == 0
    content[flag] = 1
    changed = tmp_path / "bos.gguf"
    changed.write_bytes(content)
    plain, with_bos = (load_tokenizer(resolve(path)) for path in (REAL_MODEL, changed))
    assert with_bos("Hello").input_ids == [1, *plain("Hello").input_ids]


@needs_real_model
@needs_proc
def test_real_model_loads_within_its_own_memory_and_one_tensor():
    memory = load_memory(REAL_MODEL)
    assert memory.growth < memory.model + memory.largest + 150e6, memory


def test_damaged_headers_are_value_errors(tmp_path):
    """Every cut and many overwritten fields: a ValueError or a valid file, and nothing else."""
    path = tmp_path / "x.gguf"
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    write_model(path, tiny_model("LlamaForCausalLM", **small), GGMLQuantizationType.Q8_0)
    raw = path.read_bytes()
    header = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    damaged = [raw[:end] for end in range(0, header, 7)]
    for value in (0, 1, 9, 2**31, 2**63 - 1, 2**64 - 1):
        damaged += [raw[:i] + struct.pack("<Q", value) + raw[i + 8 :] for i in range(8, header - 8, 5)]
    num_refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            GgufCheckpoint(path).hf_config()
        except ValueError:
            num_refused += 1
        except NotImplementedError:
            pass
    assert num_refused > len(damaged) // 2
