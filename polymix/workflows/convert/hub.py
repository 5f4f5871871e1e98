"""Uploading a saved model to the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from polymix.convert.adapters.libraries import load_library
from polymix.convert.saving.files import CONFIG, WEIGHTS
from polymix.errors import OptionError, one_line

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_IGNORED_FILES = ("checkpoints/*", ".*", "*.part")


def push_to_hub(
    folder: str | os.PathLike[str], repo: str, *, private: bool = False, token: str | None = None,
    message: str = "Upload a model with polymix",
) -> str:  # fmt: skip
    """Upload a folder that `polymix.save_pretrained` or `polymix convert` wrote, with its model card and pictures.

    The repository is created if it does not exist. This function and `polymix convert --push-to-hub` are the only ones
    in polymix that use the network.

    Args:
        folder: the folder.
        repo: the repository, "user/name".
        private: create it as a private repository.
        token: an access token that may write; None: the one from `hf auth login` or HF_TOKEN.
        message: of the commit.
    Returns:
        The address of the model.
    Raises:
        OptionError: the folder holds no saved model, `repo` is no name of a repository, nobody is logged in, or the
            upload fails. The folder is not changed.
        MissingExtraError: huggingface_hub is not installed.
    """
    folder = Path(folder)
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            got = f"{folder}, which has no {name}"
            raise OptionError("folder", got, "a folder with a saved model", "Save it with polymix.save_pretrained.")
    hub = check_repo(repo, "repo", token)
    try:
        api = hub.HfApi(token=token)
        api.create_repo(repo, private=private, exist_ok=True, repo_type="model")
        api.upload_folder(
            repo_id=repo, folder_path=str(folder), commit_message=message, ignore_patterns=list(_IGNORED_FILES)
        )
    except Exception as error:  # of the network, of the Hub, or of huggingface_hub
        cure = f'The folder is complete: try again with polymix.push_to_hub("{folder}", "{repo}").'
        got = f"{repo}, to which the upload fails with {one_line(error)[:300]}"
        raise OptionError("repo", got, "a repository that you may write to", cure) from error
    return f"https://huggingface.co/{repo}"


def check_repo(repo: Any, argument: str, token: str | None = None) -> Any:
    """Check, without the network, that an upload can begin; return huggingface_hub."""
    if not isinstance(repo, str) or not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise OptionError(argument, repr(repo), "a repository of the Hugging Face Hub, user/name", "")
    hub = load_library("huggingface_hub")
    if token is None and hub.get_token() is None:
        got = f"{repo}, and nobody is logged in"
        cure = "Run hf auth login, or set HF_TOKEN."
        raise OptionError(argument, got, "an access token of the Hugging Face Hub", cure)
    return hub
