"""Release stage: the trained target and draft with their model cards.

Copies the two exports into the repository folder and writes a README.md to each,
from their own provenance records: no figure is typed by hand.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from .unpack import pack

LICENCE = """\
## Text and licence

Trained only on files of CPython {python} itself: the standard library with its
tests and test data, the documentation strings and topics, the C headers, and
records that `scripts/demo/records.py` writes of the library's modules (JSON, SQL,
logs, HTML, diffs). Nothing from `site-packages`, nothing from the network. That text
is under the [PSF License Version 2](https://docs.python.org/3/license.html), copyright
Python Software Foundation; CPython incorporates some third-party files under
licences of their own, listed on the same page. The code that made these weights,
and the weights as far as they are ours to license, are under Apache-2.0.

It is a test article for speculative decoding, not a language assistant.
"""


SERVED_COLUMNS = ("prompts", "acceptance length", "drafts")


def _table(rows: dict[str, Any], heads: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, value in rows.items():
        cells = value.values() if isinstance(value, dict) else [value]
        lines.append("| " + " | ".join([name, *(str(c) for c in cells)]) + " |")
    return "\n".join(lines)


SERVED = """\
As served by vLLM on the bundled prompts (`make_demo_model.py serve-check`, with
our patches: sampled figures of vLLM 0.32 on a CPU are wrong without them):

{table}

"""


def _begin(options: dict[str, Any]) -> str:
    if options["start"]:
        return "from the target of vllm_tide 0.1's first commits, with its tokenizer"
    return "from nothing"


def target_card(provenance: dict[str, Any]) -> str:
    """Return the README of the target."""
    machine = provenance["machine"]
    held_out = _table(provenance["held_out_loss"], ("domain", "nats per token"))
    return f"""\
# Demo target

A Llama of {provenance["parameters"]:,} parameters (6 layers, hidden 256,
vocabulary 4,096, tied embeddings, bf16) for the quickstart and the tests of
vllm_tide. Made by `python scripts/make_demo_model.py target`; see
`provenance.json` for the corpus hash and every setting.
The weights are kept compressed; `scripts/install.sh` unpacks them
(`python scripts/demo/unpack.py`).

Trained for {provenance["wall_s"] / 60:.0f} minutes ({provenance["steps"]:,} steps,
{provenance["trained_tokens"]:,} tokens) on {machine["threads"]} threads of
{machine["cpu"]}, {_begin(provenance["options"])}.

Held-out loss:

{held_out}

{LICENCE.format(python=machine["python"])}"""


def draft_card(provenance: dict[str, Any]) -> str:
    """Return the README of the draft."""
    machine = provenance["machine"]
    expected = _table(
        provenance["expected_acceptance_length"],
        ("domain", "expected length", "standard error"),
    )
    served = ""
    if "served" in provenance:
        served = SERVED.format(
            table=_table(provenance["served"], ("temperature, domain", *SERVED_COLUMNS))
        )
    return f"""\
# Demo draft (EAGLE-3)

A one-layer EAGLE-3 draft of {provenance["parameters"]:,} parameters for the demo
target beside it, trained on {", ".join(provenance["options"]["domains"])} ONLY:
on other text it is meant to be poor, which is what online training repairs.
Aux layer ids {provenance["aux_layer_ids"]} (vLLM's convention: the residual
stream entering that layer). Embeddings are the target's and are not stored.
The weights are kept compressed; `scripts/install.sh` unpacks them
(`python scripts/demo/unpack.py`).

Trained for {provenance["options"]["minutes"]:g} minutes ({provenance["steps"]:,}
steps) on {provenance["train_traces"]:,} continuations by the target, on
{machine["threads"]} threads of {machine["cpu"]}.

Expected acceptance length on held-out prompts, greedy (tokens per target step,
the token of the target itself included, {provenance["expected_depth"]} drafted;
teacher-forced, loops left out):

{expected}

{served}{LICENCE.format(python=machine["python"])}"""


def release(work: Path, output: Path) -> dict[str, int]:
    """Copy both exports with their cards; return bytes of weights."""
    sizes = {}
    for name, card in (("target", target_card), ("draft", draft_card)):
        folder = output / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / name, folder)
        provenance = json.loads((folder / "provenance.json").read_text())
        if name == "target" and not provenance["final"]:
            raise ValueError("the target is an intermediate checkpoint")
        (folder / "README.md").write_text(card(provenance))
        sizes[name] = (folder / "model.safetensors").stat().st_size
        pack(folder / "model.safetensors")
    return sizes
