"""The command line: parse words, call the library, print; one line for a wrong argument."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any, NoReturn

import typer

from shardwise import __version__
from shardwise.cli.bench import bench
from shardwise.cli.convert import convert
from shardwise.cli.demo import demo
from shardwise.cli.diff import diff
from shardwise.cli.doctor import doctor
from shardwise.cli.inspect import inspect
from shardwise.cli.plan import plan
from shardwise.cli.reshard_plan import reshard_plan
from shardwise.cli.show import show
from shardwise.cli.verify import verify
from shardwise.errors import DamagedError, ShardwiseError

__all__ = ["app", "main"]

# The `shardwise` command, to which each command is added.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

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
        message = error.format_message()
        if not message:  # no words at all: the help has been printed
            sys.exit(2)
        words = error.ctx.command_path if error.ctx is not None else "shardwise"
        end = "" if message.endswith((".", "?")) else "."
        _refuse(f"{message}{end} Examples: {words} --help")
    except DamagedError as error:
        _refuse(str(error), status=1)
    except ShardwiseError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename or 'file'}: {error.strerror or error}. Pass another path.")
    except MemoryError:
        _refuse("not enough memory. Take a smaller shape, fewer boxes or a smaller --max-bytes.")
    except RecursionError:
        _refuse("an argument is nested too deeply.")
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
def _root(
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


for _command in (show, reshard_plan, plan, doctor, demo, bench, inspect, convert, verify, diff):
    app.command()(_command)
