"""Load the causal language model and the tokenizer of a folder, whether transformers or polymix saved it."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

import polymix.models.language  # noqa: F401  # first: it cures torchvision, and registers our classes
from polymix.convert import load_pretrained
from polymix.convert.adapters.libraries import load_whole, local_files
from polymix.devices import DTYPES
from polymix.errors import DataError, OptionError, PolymixError, check_choice, one_line
from polymix.export.language import FOLDER as TOKENIZER
from polymix.files import read_json
from polymix.limits import check_counts, check_model

from polymix.workflows.generate.exported import is_export, load_exported  # isort: skip
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # isort: skip

_OPTIONS_CURE = "Without this file the model generates with the defaults."
FOLDER = "a folder of a causal language model, as save_pretrained or polymix export writes it"


def load(folder: str | Path, *, device: str = "cpu", dtype: str | None = None, trust: bool = False) -> tuple[Any, Any]:
    """The causal model of a folder, in evaluation mode, and its tokenizer. Nothing is downloaded.

    A folder that `polymix export` wrote is run by ONNX Runtime, in float32 on the CPU.

    Args:
        dtype: None: as the weights were saved.
        trust: run code that the folder names.
    Raises:
        DataError: there is no such model, or no tokenizer. ResultsError: weights are missing. OptionError: a wrong
            `dtype`, or `trust` is needed.
    """
    folder = Path(folder)
    check_choice("dtype", dtype, (None, *DTYPES))
    if is_export(folder):
        for option, value, default in (("device", device, "cpu"), ("dtype", dtype, None), ("trust", trust, False)):
            if value != default:
                got = f"{value!r} with {folder}, an export"
                raise OptionError(option, got, f"{default!r}: its files run in float32 on the CPU", "Leave it out.")
        return load_exported(folder), load_tokenizer(folder / TOKENIZER)
    if not (folder / "config.json").is_file():
        cure = "Nothing is downloaded: get the model first."
        if (folder / "checkpoint").is_dir():
            cure = "Its training was interrupted: continue it with polymix train … --resume."
        raise DataError("folder", f"{folder}, which has no config.json", FOLDER, cure)
    tokenizer = load_tokenizer(folder, trust)
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    content = read_json(folder / "config.json", DataError, "folder", FOLDER, "Fetch or save it again.")
    if not isinstance(content, dict):
        raise DataError("folder", f"{folder}, whose config.json holds a {type(content).__name__}", FOLDER, "")
    check_counts(content, "folder", str(folder))
    options = folder / "generation_config.json"
    if options.exists() and not isinstance(read_json(options, DataError, "folder", FOLDER, _OPTIONS_CURE), dict):
        raise DataError("folder", f"{options}, which holds no options", FOLDER, _OPTIONS_CURE)
    try:
        if content.get("library_name") == "polymix":
            model: Any = load_pretrained(folder, device=device, dtype=torch_dtype, trust=trust)
        else:
            with local_files():
                config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
                build = partial(AutoModelForCausalLM.from_config, copy.deepcopy(config), trust_remote_code=trust)
                check_model(build, "folder", str(folder), "Use a smaller model.")
            model, _ = load_whole(AutoModelForCausalLM, folder, "folder", trust=trust, dtype=torch_dtype or "auto")
            model.to(device)
    except PolymixError as error:
        if error.argument in ("trust", "device", "dtype", "folder") or str(folder) in str(error):
            raise
        raise DataError("folder", f"{folder}, which fails with {_short(error)}", FOLDER, error.cure) from error
    except Exception as error:  # whatever the library raises on a damaged folder, or another kind of model
        raise DataError("folder", f"{folder}, which fails with {_short(error)}", FOLDER, "") from error
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        raise DataError("folder", f"{folder}, a {type(model).__name__}, which generates no text", FOLDER, "")
    return model.eval(), tokenizer


def load_tokenizer(folder: Path, trust: bool = False) -> Any:
    """The tokenizer in a model's folder."""
    try:
        with local_files():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        empty = len(tokenizer) <= len(set(tokenizer.all_special_ids))  # transformers made it from the config alone
        reason = "none, or an empty one" if empty else None
    except Exception as error:
        reason = _short(error)
    if reason is not None:
        cure = "Copy the tokenizer's files (tokenizer.json, tokenizer_config.json …) into the folder."
        raise DataError("tokenizer", f"{reason} in {folder}", "the model's tokenizer in its folder", cure)
    return tokenizer


def _short(error: Exception) -> str:
    return one_line(error)[:300]
