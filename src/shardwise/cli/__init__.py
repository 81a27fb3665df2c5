"""The `shardwise` command. Each command imports what it needs when it runs."""

from shardwise.cli.app import app, main

__all__ = ["app", "main"]
