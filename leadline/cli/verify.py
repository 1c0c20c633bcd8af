"""`leadline verify`: does this machine compute what the published reference computed?"""

from __future__ import annotations

import json as json_format
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from leadline.cli import options
from leadline.errors import VerificationError
from leadline.llm import resolve_model
from leadline.model.model import Model
from leadline.verify.formats import check_formats
from leadline.verify.operators import check_operators
from leadline.verify.parts import Part
from leadline.verify.recording import RECORDING, check_decode, check_recording, read_recording


def verify(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id; empty: the small random model.")] = "",
    recording: Annotated[
        str, typer.Argument(help="Recorded values of the reference.", show_default=f"{RECORDING} beside the model")
    ] = "",
    *,
    device: Annotated[str, typer.Option(help="Device to check, as torch names it.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Check this machine: formats, operators, and a model against itself and a recording."""
    where = options.device_of(device)
    folder = resolve_model(model or None)
    path = Path(recording) if recording else folder / RECORDING
    recorded = read_recording(path) if recording or path.exists() else None
    loaded = Model.load(folder, device=where)
    options.choose_threads(loaded.config)
    parts = check_formats() + check_operators(loaded.device) + check_decode(loaded)
    if recorded is not None:
        parts += check_recording(loaded, recorded)
    if json:
        document = {
            "device": str(where),
            "recording": None if recorded is None else str(path),
            "parts": [_plain(part) for part in parts],
        }
        typer.echo(json_format.dumps(document, indent=2))
    else:
        console = Console()
        console.print(_table(parts))
        if recorded is None:
            console.print(
                f"no recording: {path} does not exist, so only formats, operators and the model against itself were "
                "checked; name one as second argument",
                markup=False,
                soft_wrap=True,
            )
    failed = [part.name for part in parts if not part.passed]
    if failed:
        raise VerificationError(
            f"{len(failed)} of {len(parts)} parts are not reproduced within tolerance: {', '.join(failed)}; "
            "the first of them is the place to look, later ones may follow from it"
        )


def _plain(part: Part) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None  # JSON has no NaN

    checks = [{"what": c.what, "value": number(c.value), "limit": c.limit, "passed": c.passed} for c in part.checks]
    return {
        "part": part.name,
        "worst": number(part.worst),
        "rms": number(part.rms),
        "checks": checks,
        "passed": part.passed,
    }


def _table(parts: list[Part]) -> Table:
    rows = [
        {
            "part": part.name,
            "worst": f"{part.worst:.2g}",
            "RMS": f"{part.rms:.2g}",
            "tolerance": "\n".join(f"{c.what} {c.value:.2g} of {c.limit:.2g}" for c in part.checks),
            "verdict": "[green]pass[/]" if part.passed else "[red]FAIL[/]",
        }
        for part in parts
    ]
    return options.table("Comparison", rows, right=("worst", "RMS"))
