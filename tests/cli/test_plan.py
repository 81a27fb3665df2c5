"""`shardwise plan`, and the rehearsal behind it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tests.cli.running import run_command
from torch import nn

import shardwise
from shardwise.cli.language_models import CausalModel, tensor_parallel_plan
from shardwise.cli.rehearsal import InputShape, rehearse
from shardwise.comm.simulate import simulate

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.sharding_plan import ShardingPlan

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "torch_dtype": "float32",
}
MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def make():
    return Model()


def needs_values():
    model = Model()
    model.register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
    return model


def says_nothing():
    model = Model()

    def stop(module, args):
        raise AssertionError

    model.register_forward_pre_hook(stop)
    return model


def plan(world_size):
    from shardwise import ShardingPlan

    return ShardingPlan(
        {"up.*": "chunk(0)", "down.weight": "chunk(1)"},
        {"down": "replicate()"},
        input_plan={"": "replicated"},
    )
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "some_model.py"
    path.write_text(MODEL)
    return path


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))


PLANS = [
    shardwise.ShardingPlan(
        {"0.*": "chunk(0, sizes=[5, 0, 4])", "2.weight": "chunk(1, sizes=[5, 0, 4])"},
        {"2": "replicate()"},
        input_plan={"": "replicated"},
    ),
    shardwise.ShardingPlan({"0.weight": "on_rank(2)"}, input_plan={"": "chunk(0)"}),
]


@pytest.mark.parametrize("plan", PLANS, ids=["uneven", "rows"])
def test_a_rehearsal_sends_what_a_step_with_data_sends(plan: ShardingPlan) -> None:
    def step(rank: int) -> int:
        torch.manual_seed(0)
        model = shardwise.shard_module(_mlp(), plan, src_rank=None)
        with shardwise.implicit_comm("allow"), shardwise.trace(show=False) as sent:
            model(torch.ones(7, 6)).sum().backward()
        return sent.sent

    rehearsed = rehearse(_mlp, plan, 3, [InputShape((7, 6), torch.float32)], names_lines=False)
    assert rehearsed.problem is None
    assert rehearsed.sent == dict(enumerate(simulate(step, 3).results))
    assert any(rehearsed.sent.values())


def test_a_rehearsal_names_no_line_where_none_is_the_users() -> None:
    inputs = [InputShape((7, 6), torch.float32)]
    rehearsed = rehearse(_mlp, PLANS[0], 3, inputs, names_lines=True)
    assert rehearsed.lines
    assert {line.at for line in rehearsed.lines} == {""}


def test_a_configuration_gives_a_model_that_computes_and_is_sharded_alike() -> None:
    def loss(rank: int, plan: ShardingPlan | None) -> torch.Tensor:
        torch.manual_seed(0)
        model: nn.Module = CausalModel(CONFIG)
        if plan is not None:
            model = shardwise.shard_module(model, plan, src_rank=None)
        found: torch.Tensor = model(torch.arange(10).view(2, 5))
        return found.full_tensor() if isinstance(found, shardwise.ShardedTensor) else found

    (alone,) = simulate(loss, 1, None).results
    for world_size in (1, 3):
        for found in simulate(loss, world_size, tensor_parallel_plan(CONFIG)).results:
            torch.testing.assert_close(found, alone)


def test_plan_shows_bytes_and_what_a_step_sends(model_file: Path) -> None:
    words = [f"{model_file}:make", "--plan", f"{model_file}:plan", "--world-size", "2"]
    done = run_command("plan", *words, "--input", "4x8:float32")
    assert done.status == 0, done.err
    assert "after 880 B on 2 ranks, 440 B each" in done.out
    assert "up.weight" in done.out
    assert "some_model.py:12" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out

    shown = json.loads(run_command("plan", *words, "--input", "4x8:float32", "--json").out)
    # Half of 8 x 12 + 12 and of 12 x 8, and the whole of 8; 4 bytes each.
    assert shown["after"]["bytes"] == {"0": 440, "1": 440}
    # A sum of 4 x 8 over two ranks: each sends its half of the addends, and its half of the sum.
    assert shown["step"]["bytes_sent"] == {"0": 128, "1": 128}

    done = run_command("plan", *words)
    assert "Pass --input" in done.out


def test_plan_reads_configurations_and_plans_in_files(tmp_path: Path) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "plan.yaml"
    own = {"tie_word_embeddings": True, "model_type": "llama", "max_position_embeddings": None}
    config.write_text(json.dumps(CONFIG | own))
    shardwise.ShardingPlan({"*": "replicate()"}, input_plan={"": "replicated"}).save(plan)
    words = [str(config), "--input", "2x4", "--world-size", "2", "--json"]
    cut = json.loads(run_command("plan", *words).out)
    copies = json.loads(run_command("plan", *words, "--plan", str(plan)).out)
    assert cut["after"]["total"] < copies["after"]["total"] == 2 * copies["after"]["bytes"]["0"]
    assert sum(cut["step"]["bytes_sent"].values()) > 0
    assert copies["step"] == {"problem": None, "bytes_sent": {}, "ops": []}


@pytest.mark.parametrize(
    ("make", "problem"), [("needs_values", "RuntimeError: "), ("says_nothing", "AssertionError")]
)
def test_what_cannot_be_rehearsed_is_said(model_file: Path, make: str, problem: str) -> None:
    words = [f"{model_file}:{make}", "--plan", f"{model_file}:plan", "--input", "4x8:float32"]
    done = run_command("plan", *words)
    assert done.status == 0, done.err
    assert "not known" in done.out
    found = json.loads(run_command("plan", *words, "--json").out)["step"]["problem"]
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing argument 'model'"),
        (["model"], "MODEL: expected model.py:make, or a config.json, got 'model'"),
        (["absent.py:make"], "file 'absent.py': No such file"),
        (["{file}:nothing", "--plan", "{file}:plan"], "has no 'nothing'"),
        (["{file}:Model"], "--plan: expected plan.yaml, plan.json or plans.py:name, got none"),
        (["{file}:make", "--plan", "absent.yaml"], "plan 'absent.yaml': No such file"),
        (["{file}:make", "--plan", "{file}:make"], "make raises TypeError"),
        (["{file}:plan", "--plan", "{file}:plan"], "plan raises TypeError"),
        (["{file}:make", "--plan", "{file}:plan", "--input", "8by8"], "--input: expected sizes"),
        (["{folder}/config.json"], "model_type of the config.json: expected one of llama"),
        (["{folder}/long.json"], "max_position_embeddings of the config.json: expected a whole"),
        (["{file}:make", "--world-size", "0"], "--world-size"),
    ],
)
def test_a_wrong_call_of_plan_gets_one_line(
    model_file: Path, words: list[str], message: str
) -> None:
    (model_file.parent / "config.json").write_text('{"model_type": "unknown"}')
    config = json.dumps(CONFIG | {"max_position_embeddings": "many"})
    (model_file.parent / "long.json").write_text(config)
    done = run_command(
        "plan", *(word.format(file=model_file, folder=model_file.parent) for word in words)
    )
    assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1), done.err
    assert message in done.err
