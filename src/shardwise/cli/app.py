"""The command line: parse words, call the library, print; one line for a wrong argument."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardwise import __version__
from shardwise.cli.bench import bench
from shardwise.cli.convert import convert
from shardwise.cli.demo import demo
from shardwise.cli.diff import diff
from shardwise.cli.doctor import doctor
from shardwise.cli.inspect import inspect, saved_layout
from shardwise.cli.plan import plan
from shardwise.cli.reshard_plan import reshard_plan
from shardwise.cli.verify import verify
from shardwise.cli.words import itemsize_of, layout_of, parse_shape, write_pictures
from shardwise.errors import ArgumentValueError, DamagedError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.geometry import Layout

__all__ = ["app", "main", "options", "show"]

# The `shardwise` command, to which each command is added.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

_MOST_RANKS = 10**6  # each is a placement in memory before anything is drawn
# click's class for wrong words; newer versions of typer have a copy of click of their own.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Runs the command line. What goes wrong is one line on stderr.

    The status is 2 for a wrong or too large argument, 1 for a damaged checkpoint.
    """
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot encode must not end in a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(app(standalone_mode=False))
    except _USAGE_ERROR as error:
        message = error.format_message().rstrip(".")
        if not message:  # no words at all: the help has been printed
            sys.exit(2)
        words = error.ctx.command_path if error.ctx is not None else "shardwise"
        _refuse(f"{message}. Examples: {words} --help")
    except DamagedError as error:
        _refuse(str(error), status=1)
    except ShardwiseError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename or 'file'}: {error.strerror or error}. Pass another path.")
    except MemoryError:
        _refuse("not enough memory. Take a smaller shape, fewer boxes or a smaller --max-bytes.")
    except RecursionError:
        _refuse("--spec is nested too deeply.")
    except OverflowError as error:
        _refuse(f"too large to draw: {error}. Take a smaller shape, or smaller ranks.")


def _refuse(message: str, status: int = 2) -> NoReturn:
    print("shardwise:", " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Tensors cut into boxes and spread over ranks: layouts, plans, checkpoints.

    \b
    Examples:
      shardwise doctor
      shardwise show --shape 8,6 --spec "grid([2, 2])"
      shardwise inspect run/step_100
    """


@app.command()
def show(
    shape: Annotated[
        str | None, typer.Option(help="The tensor's sizes, e.g. 8,6; '' for a 0-d tensor.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            help="How to cut it: chunk(dim), grid(splits), fused(dim, sections), "
            "block_cyclic(dim, block), flat(), replicate(), partial(), on_rank(rank)."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Instead of both: a checkpoint ...", metavar="PATH")
    ] = None,
    tensor: Annotated[str | None, typer.Option(help="... and the name of a tensor in it.")] = None,
    world_size: Annotated[int, typer.Option(min=1, max=_MOST_RANKS, help="Number of ranks.")] = 4,
    dtype: Annotated[str, typer.Option(help="For the bytes per rank.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print entries for a program.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to look at: all slices.", metavar="PATH")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.", metavar="PATH")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.", metavar="PATH")] = None,
) -> None:
    """Draw who holds which part of a tensor.

    \b
    Examples:
      shardwise show --shape 8,6 --spec "chunk(0)"
      shardwise show --shape 8,6 --spec "chunk(0, sizes=[1, 2, 0, 5])"
      shardwise show --shape 8,6 --spec "grid([2, 2])" --dtype bfloat16
      shardwise show --shape 8,6 --spec "grid([2, 1], ranks=[[0, 1], [2, 3]])"
      shardwise show --shape 12,4 --spec "fused(0, [6, 3, 3])" --world-size 3
      shardwise show --shape 2,4,6 --spec "flat()" --world-size 3
      shardwise show --shape 2,4,6 --spec "flat()" --html flat.html
      shardwise show --checkpoint run/step_100 --tensor model.norm.weight
    """
    title = _checked_choice({"--shape": shape, "--spec": spec}, checkpoint, tensor)
    if checkpoint is not None and tensor is not None:
        layout, itemsize, world_size = saved_layout(checkpoint, tensor)
    else:
        itemsize, sizes = itemsize_of(dtype), parse_shape(shape or "")
        layout = layout_of(spec or "", sizes, world_size=world_size)
    paths = {".html": html, ".png": png, ".svg": svg}
    write_pictures(layout, paths, title=title, itemsize=itemsize, world_size=world_size)
    if as_json:
        print(json.dumps(_entries(layout, itemsize), indent=2))
        return
    from shardwise.viz import print_layout

    print_layout(layout, title=title, itemsize=itemsize, world_size=world_size)


def _checked_choice(
    drawn: dict[str, str | None], checkpoint: Path | None, tensor: str | None
) -> str:
    """What is to be drawn, in words; raises unless it is a spec of a shape or a saved tensor."""
    saved = {"--checkpoint": checkpoint, "--tensor": tensor}
    given = [name for name, value in {**drawn, **saved}.items() if value is not None]
    if given not in (list(drawn), list(saved)):
        raise ArgumentValueError(
            "show",
            expected="--shape and --spec, or --checkpoint and --tensor",
            got=" and ".join(given) or "neither",
            fix="Examples: shardwise show --help",
        )
    return str(tensor if tensor is not None else drawn["--spec"])


for _command in (reshard_plan, plan, doctor, demo, bench, inspect, convert, verify, diff):
    app.command()(_command)


def _entries(layout: Layout, itemsize: int) -> dict[str, object]:
    return {
        "shape": layout.shape,
        "pending": layout.pending,
        "bytes_per_rank": layout.bytes_per_rank(itemsize),
        "entries": [
            {"start": box.start, "stop": box.stop, "rank": rank, "term": term}
            for box, rank, term in layout
        ],
    }
