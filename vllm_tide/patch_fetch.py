"""Fetches a source archive of vLLM from the package index that pip is set up for.

``pip download`` cannot: it insists on building the metadata of a source archive, which
for vLLM needs CUDA. So the archive is looked up with pip's own finder, which reads the
same index, proxy and certificate settings. pip is imported only when called.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path

from vllm_tide.patch_series import PatchError

_NEWEST_NAMED = 5


def fetch_sdist(version: str, folder: Path) -> Path:
    """Downloads ``vllm-<version>.tar.gz`` and checks it against the index's hash.

    Args:
        version: For example ``0.33.0``.
        folder: Where to put it; made if absent.

    Raises:
        PatchError: There is no pip here, no such release, or the download failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}.tar.gz"
    try:
        create_command = import_module("pip._internal.commands").create_command
        error_type = import_module("pip._internal.exceptions").PipError
    except (ImportError, AttributeError) as error:
        raise PatchError(
            f"This Python has no pip to fetch vLLM {version} with ({error}): download "
            "its source archive elsewhere and give it with --source."
        ) from error
    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
    try:
        with command.main_context():
            session = command.get_default_session(options)
            finder = command._build_package_finder(options=options, session=session)
            links = {
                str(candidate.version): candidate.link
                for candidate in finder.find_all_candidates("vllm")
                if not candidate.link.is_wheel
            }
            if version not in links:
                raise PatchError(_absent(version, list(links)))
            link = links[version]
            response = session.get(link.url_without_fragment, stream=True)
            response.raise_for_status()
            digest = hashlib.new(link.hash_name or "sha256")
            with open(path, "wb") as stream:
                for chunk in response.iter_content(1 << 20):
                    digest.update(chunk)
                    stream.write(chunk)
    except (OSError, error_type) as error:
        raise PatchError(
            f"vLLM {version} could not be downloaded ({error}): try again, or give its "
            "source archive with --source."
        ) from error
    if link.hash and digest.hexdigest() != link.hash:
        path.unlink()
        raise PatchError(
            f"What came for vLLM {version} does not have the hash that the package "
            "index states: try again."
        )
    return path


def _absent(version: str, known: list[str]) -> str:
    if not known:
        return (
            "The package index has no source archive of vLLM at all: check pip's "
            "index settings, or give an archive with --source."
        )
    newest = sorted(known, key=_order)[-_NEWEST_NAMED:]
    return (
        f"The package index has no source archive of vLLM {version} (newest: "
        f"{', '.join(newest)}): choose one of those, or give --source."
    )


def _order(version: str) -> list[int]:
    parts = version.replace("rc", ".").replace("post", ".").split(".")
    return [int(part) for part in parts if part.isdigit()]
