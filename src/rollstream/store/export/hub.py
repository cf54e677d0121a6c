"""Pushing an exported dataset to the Hugging Face hub."""

from pathlib import Path

from rollstream.errors import ConfigError, StorageError


def check_login() -> None:
    """Raises `ConfigError` when nobody is logged in, `StorageError` when the hub cannot be reached."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    except ImportError as error:
        raise ConfigError(
            "pushing needs huggingface_hub, not installed here: pip install 'rollstream[hub]'"
        ) from error
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            "nobody is logged in to the Hugging Face hub: `hf auth login`, or a token in HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ConfigError(
                f"the Hugging Face hub refuses this token (status {status}): `hf auth login` anew"
            ) from error
        raise StorageError(f"the Hugging Face hub answers with status {status}; try again later") from error
    except Exception as error:  # what the HTTP library raises depends on the hub client's version
        raise StorageError(f"cannot reach the Hugging Face hub: {error}") from error


def push_folder(folder: Path, repo: str, *, public: bool = False) -> str:
    """Uploads a dataset folder; returns its address. Data files of an earlier push go in the same commit.

    Args:
        folder: as `export_hf` has written it.
        repo: `name` or `owner/name`; made when it is not there.
        public: of a new repository; it is private otherwise. One that is there stays as it is.

    Raises:
        ConfigError: the hub refuses the name, or to write there.
        StorageError: it could not be uploaded; the folder is there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        made = api.create_repo(repo, repo_type="dataset", private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            repo_type="dataset",
            folder_path=folder,
            commit_message="Trajectories from rollstream",
            delete_patterns=["data/train-*.parquet"],
        )
    except HFValidationError as error:
        raise ConfigError(f"--push {repo}: {error}") from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403, 404):
            raise ConfigError(f"the Hugging Face hub does not let you write to {repo}: {error}") from error
        raise StorageError(f"cannot push to {repo}: {error}. {folder} is there; push it again") from error
    except Exception as error:  # as above
        raise StorageError(f"cannot push to {repo}: {error}. {folder} is there; push it again") from error
    return f"https://huggingface.co/datasets/{made.repo_id}"
