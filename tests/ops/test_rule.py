"""The table of rules: who may enter it, and where its files are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise.ops
from shardwise.errors import ArgumentTypeError
from shardwise.ops import COMPOSITES, RULES
from shardwise.ops.rule import Rule, composite, register

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_a_function_that_has_a_rule_keeps_it() -> None:
    before = dict(RULES)
    register(Rule("another", lambda call: None), [torch.add, torch.nn.functional.glu])
    assert before == RULES


@pytest.mark.parametrize("function", [torch.add, torch.nn.functional.glu])
def test_what_has_a_rule_is_not_written_in_others(function: Any) -> None:
    before = dict(COMPOSITES)
    with pytest.raises(ArgumentTypeError, match="has a rule already"):
        composite("another", [function])(lambda x: x)
    assert before == COMPOSITES


def test_the_page_of_the_architecture_names_every_file() -> None:
    page = PAGE.read_text()
    files = [path.name for path in Path(shardwise.ops.__file__).parent.glob("*.py")]
    assert [name for name in files if f"`{name}`" not in page and f"`ops/{name}`" not in page] == [
        "__init__.py"
    ]
