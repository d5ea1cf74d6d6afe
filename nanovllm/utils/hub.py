"""Turns the `model` argument into a local directory: the directory itself, or a hub id that is downloaded.

`Config` calls it once; `huggingface_hub` is imported only when there is something to download.
"""

import os
import re

# What the engine and AutoTokenizer read. Everything else in a repository (other frameworks' weights) stays there.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_SUBFOLDERS = ["*/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model_path(model: str | os.PathLike[str]) -> str:
    """Absolute path of the directory that holds the model; downloads a hub id ("org/name") if need be.

    Raises ValueError for a path that does not exist or is no directory, OSError for a download that failed.
    """
    model = os.fspath(model)
    path = os.path.abspath(os.path.expanduser(model))
    if model and os.path.isdir(path):  # "" would be the current directory
        return path
    if os.path.isfile(path):
        raise ValueError(f"model={model!r} is a file; give the directory that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"model={model!r}: no such directory; give an existing one, or a hub id of the form 'org/name'"
        )
    return _download(model)


def _download(repo_id: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_SUBFOLDERS)
    except Exception as error:  # the client raises its own classes, its HTTP library's and the system's
        raise OSError(
            f"model={repo_id!r} is no local directory ({os.path.abspath(repo_id)} does not exist), and "
            f"downloading it from the hub failed "
            f"({type(error).__name__}: {error}). Check the name and the network, unset HF_HUB_OFFLINE if it is set, "
            "or pass the path of a local directory with config.json, *.safetensors and the tokenizer files."
        ) from error
