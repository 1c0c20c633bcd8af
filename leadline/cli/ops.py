"""`leadline ops`: which implementations of the operators run here."""

from __future__ import annotations

import dataclasses
import importlib
import json as json_format
import pkgutil
from typing import Annotated

import torch
import typer
from rich.console import Console

import leadline.ops
from leadline.cli import options
from leadline.ops import dispatch


def ops(
    *,
    device: Annotated[
        str, typer.Option(help="Device to ask about, as torch names it.", show_default="cuda if there is one, else cpu")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List the operators, their implementations and what runs here."""
    for module in pkgutil.iter_modules(leadline.ops.__path__):  # an operator is registered when its file is imported
        importlib.import_module(f"leadline.ops.{module.name}")
    where = options.device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows = dispatch.table(where)
    if json:
        document = {"device": str(where), "operators": [dataclasses.asdict(row) for row in rows]}
        typer.echo(json_format.dumps(document, indent=2))
        return
    headings = ("operator", "implementation", "runs", "why not")
    cells = ((row.op, row.impl, "[green]yes[/]" if row.runs else "[red]no[/]", row.reason) for row in rows)
    named = [dict(zip(headings, line, strict=True)) for line in cells]
    Console().print(options.table(f"Operators on {where}", named))
