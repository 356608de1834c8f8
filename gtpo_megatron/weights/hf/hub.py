"""The folder of a model that is named as on the Hugging Face hub: in the hub's cache, downloaded at its first use.

A folder is that of a commit: without one in the name it is the newest, and a run that is continued keeps its own.
Without torch, so that the planner can ask.
"""

import logging
import re
from pathlib import Path

from gtpo_megatron.config.model import hub_name
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import read_json
from gtpo_megatron.untrusted.text import printable

logger = logging.getLogger(__name__)

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What a folder is read of: configuration, weights, tokenizer, chat templates. No code."""

DOWNLOADED = ".gtpo_megatron_downloaded"
"""Empty file in a folder that was downloaded whole."""

_COMMIT = re.compile("[0-9a-f]{40}")

OTHER_FORMATS = ("original/*", "consolidated*", "onnx/*", "openvino/*")
"""The same weights once more."""


def hub_folder(path: str, earlier: str = "") -> Path:
    """The folder of the model's commit in the hub's cache; what is missing there is downloaded, with a bar.

    Args:
        path: name of the model, with or without a commit.
        earlier: folder that the run which is continued has.

    Raises:
        ConfigError: the hub has no such model or commit, or cannot be reached and the cache does not have it.
    """
    from huggingface_hub import snapshot_download

    repository, revision = hub_name(path)
    if not _COMMIT.fullmatch(revision) and _is_of(repository, earlier):
        return Path(earlier)
    try:
        commit = _commit(repository, revision)
    except Exception as error:
        if (cached := cached_hub_folder(path)) is None:
            raise _not_had(path, error) from error
        logger.warning(
            "%s: the hub does not answer (%s): the cache's %s", repository, type(error).__name__, cached.name
        )
        return cached
    if (cached := cached_hub_folder(f"{repository}@{commit}")) is not None:
        return cached
    logger.warning("%s: commit %s is downloaded from the Hugging Face hub, once", repository, commit[:12])
    try:
        found = snapshot_download(
            repository, revision=commit, allow_patterns=list(FILES), ignore_patterns=list(OTHER_FORMATS)
        )
        (Path(found) / DOWNLOADED).touch()
    except Exception as error:  # whatever huggingface_hub and its transport raise
        raise _not_had(path, error) from error
    return Path(found)


def cached_hub_folder(path: str) -> Path | None:
    """The folder of the commit that the cache has last seen, or of the one that is named; None: it is not whole.

    It is whole if a run has downloaded it, or weights and tokenizer are there: of a plan's there is ``config.json``.
    """
    from huggingface_hub import snapshot_download

    repository, revision = hub_name(path)
    try:
        found = Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
        is_whole = (found / DOWNLOADED).exists() or (_has_weights(found) and any(found.glob("*token*")))
    except Exception:  # noqa: BLE001 - it is not there, or nothing that can be
        return None
    return found if is_whole else None


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    names = Fields(read_json(index, error=ConfigError), str(index), ConfigError).get("weight_map", dict[str, str])
    return all((folder / name).is_file() for name in set(names.values()))


def hub_config(path: str) -> Path:
    """A folder with the model's ``config.json`` and maybe nothing else.

    Raises:
        ConfigError: as for :func:`hub_folder`.
    """
    from huggingface_hub import hf_hub_download

    repository, revision = hub_name(path)
    try:
        return Path(hf_hub_download(repository, "config.json", revision=revision or None)).parent
    except Exception as error:  # whatever huggingface_hub and its transport raise
        raise _not_had(path, error) from error


def _is_of(repository: str, folder: str) -> bool:
    """Whether a folder is one of this repository's in the hub's cache, and still there."""
    from huggingface_hub.file_download import repo_folder_name

    return repo_folder_name(repo_id=repository, repo_type="model") in Path(folder).parts and Path(folder).is_dir()


def _commit(repository: str, revision: str) -> str:
    """The commit that a branch or tag is at now, so that all files are of one."""
    from huggingface_hub import HfApi

    commit = HfApi().model_info(repository, revision=revision or None).sha
    if commit is None:
        raise ConfigError(f"the hub names no commit of it; write {repository}@COMMIT")
    return commit


def _not_had(path: str, error: Exception) -> ConfigError:
    repository, revision = hub_name(path)
    of_commit = f" --revision {revision}" if revision else ""
    said = printable(error).splitlines()
    return ConfigError(
        f"model.path={printable(path)}: there is no folder of this name, and it cannot be had from the Hugging Face "
        f"hub ({type(error).__name__}{f': {said[0]}' if said else ''}); where there is a network: hf download "
        f"{repository}{of_commit} --local-dir FOLDER, and name that folder"
    )
