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
from rich.table import Table

import leadline.ops
from leadline.ops import dispatch


def ops(
    device: Annotated[
        str, typer.Option(help="Device to ask about, as torch names it.", show_default="cuda if there is one, else cpu")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List the operators, their implementations and what runs here."""
    for module in pkgutil.iter_modules(leadline.ops.__path__):  # an operator is registered when its file is imported
        importlib.import_module(f"leadline.ops.{module.name}")
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"expected a torch device such as cpu or cuda:0, got {name!r}") from None
    rows = dispatch.table(where)
    if json:
        document = {"device": str(where), "operators": [dataclasses.asdict(row) for row in rows]}
        typer.echo(json_format.dumps(document, indent=2))
        return
    table = Table(title=f"Operators on {where}", title_justify="left")
    for heading in ("operator", "implementation", "runs", "why not"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.op, row.impl, "[green]yes[/]" if row.runs else "[red]no[/]", row.reason)
    Console().print(table)
