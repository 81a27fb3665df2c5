"""The `shardwise` command. Each command imports what it needs when it runs."""

from shardwise.cli.app import app, main
from shardwise.cli.checkpoints import add_commands

__all__ = ["app", "main"]

add_commands(app)
