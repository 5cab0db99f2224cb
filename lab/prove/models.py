"""The models of the servers: tiny random ones, and a copy of any model with other weights under the same
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvferry.transports.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Tokens of every prompt: these exist in any vocabulary, and are no special tokens in the tiny one.
TOKENS: Final = range(3, 250)

_CONFIG: Final[Mapping[str, object]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}
#: So large that every token of a prompt changes the answer. With a usual deviation a wrong cache could go
#: unnoticed.
_DEVIATION: Final = 0.3
_EOS: Final = "<eos>"
#: The token that stands for an image in a prompt for the tiny image model.
IMAGE_TOKEN: Final = 257


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama model in float32 without a tokenizer, in the format of Hugging Face.

    Args:
        folder: Created if it does not exist.
        seed: Seed of the weights. The same seed writes the same model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed)
    width, inner, vocabulary, heads = 128, 96, 257, 32
    tensors: dict[str, np.ndarray] = {}

    def draw(name: str, *shape: int) -> None:
        tensors[name] = (noise.standard_normal(shape) * _DEVIATION).astype("<f4")

    draw("model.embed_tokens.weight", vocabulary, width)
    for layer in range(3):
        at = f"model.layers.{layer}"
        draw(f"{at}.self_attn.q_proj.weight", 4 * heads, width)
        draw(f"{at}.self_attn.k_proj.weight", 2 * heads, width)
        draw(f"{at}.self_attn.v_proj.weight", 2 * heads, width)
        draw(f"{at}.self_attn.o_proj.weight", width, 4 * heads)
        draw(f"{at}.mlp.gate_proj.weight", inner, width)
        draw(f"{at}.mlp.up_proj.weight", inner, width)
        draw(f"{at}.mlp.down_proj.weight", width, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = np.ones(width, "<f4")
    tensors["model.norm.weight"] = np.ones(width, "<f4")
    draw("lm_head.weight", vocabulary, width)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for values in tensors.values():
            file.write(values.tobytes())
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2))
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {_EOS: len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS)  # type: ignore[no-untyped-call]
    wrapped.chat_template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}assistant:"
    return wrapped


def write_tiny_image_model(folder: Path) -> Path:
    """Write a random Idefics3 model in float32: images of 32 x 32 pixels, each four vectors among the
    prompt's.
    """
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, set_seed
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    from kvferry.lab.engine.progress import quiet_loading

    text = {name: value for name, value in _CONFIG.items() if name not in ("architectures", "torch_dtype")}
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "initializer_range": _DEVIATION,
    }
    # The type of the class does not have the fields of its base.
    make_config: Any = Idefics3Config
    config = make_config(
        text_config={**text, "vocab_size": 320, "initializer_range": _DEVIATION, "pad_token_id": None},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        initializer_range=_DEVIATION,
        pad_token_id=None,
    )
    set_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    with quiet_loading():
        model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    # The first new token gets the id after the last one, which is `IMAGE_TOKEN`.
    items = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": items})
    edge = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=4)
    processor.save_pretrained(folder)
    return folder


def write_other_weights(model: Path, folder: Path, *, is_encoder: bool = False) -> Path:
    """Write a model that differs from another one in a single tensor only, and link its other files.

    The values of a tensor that the cache depends on are the same ones, in the opposite order. So the file has
    the same size, and no value is unusual.

    Args:
        is_encoder: The tensor is one of those that images are computed with.

    Raises:
        ConfigurationError: the model is no local folder with safetensors.
    """
    if not model.is_dir():
        raise ConfigurationError(
            f"cannot make other weights of the model {str(model)!r}: it is no local folder; download it and name the folder",
            key="--model",
            value=str(model),
        )
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        names = sorted(
            name
            for name in header
            if name.endswith(("v_proj.weight", "qkv_proj.weight", "qkv.weight", "c_attn.weight"))
            and ("vis" in name) is is_encoder
        )
        if names:
            break
    else:
        raise ConfigurationError(
            f"cannot make other weights of the model {str(model)!r}: no *.safetensors there has a tensor v_proj, qkv_proj, "
            "qkv or c_attn; name other rows than other-weights and weights-in-memory with --only",
            key="--model",
            value=str(model),
        )
    folder.mkdir(parents=True, exist_ok=True)
    for each in model.iterdir():
        if each != file:
            link = folder / each.name
            link.unlink(missing_ok=True)  # an earlier run's leads nowhere if the folder was moved since
            link.symlink_to(each.resolve())
    content = bytearray(file.read_bytes())
    start, end = (8 + length + offset for offset in header[names[0]]["data_offsets"])
    size = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(header[names[0]]["dtype"], 1)
    values = np.frombuffer(content[start:end], f"V{size}")
    content[start:end] = values[::-1].tobytes()
    (folder / file.name).write_bytes(content)
    return folder
