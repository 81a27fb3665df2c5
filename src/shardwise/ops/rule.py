"""What a rule is: a pure function from the layouts of a call's operands to a decision.

A rule sees layouts and plain arguments, never tensors, and never communicates. Its decision says in
which layout each operand is needed, which layout the result has, and what a rank computes of its
local pieces. The tensor class carries decisions out, and keeps them: the second call with the same
layouts pays a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardwise.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from shardwise.geometry import Layout

__all__ = [
    "COMPOSITES",
    "RULES",
    "Call",
    "Composite",
    "Decision",
    "Invoke",
    "Need",
    "Operand",
    "OperandPieces",
    "OutputPieces",
    "Rule",
    "Then",
    "composite",
    "register",
]

# Of each operand, the pieces on this rank.
OperandPieces: TypeAlias = "Sequence[Sequence[torch.Tensor]]"
# Of each output, the pieces on this rank.
OutputPieces: TypeAlias = "list[list[torch.Tensor]]"
# The torch function of the call, on one tensor per operand.
Invoke: TypeAlias = "Callable[..., Any]"


class Operand(NamedTuple):
    """A tensor argument as a rule sees it."""

    layout: Layout  # of a plain tensor, which is the same on all ranks: replicated on all of them
    dtype: torch.dtype
    is_plain: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.shape

    @property
    def is_linear_sum(self) -> bool:
        """Whether a linear function may take the terms of its pending sum one by one.

        Not of integers, which would wrap around in another way if the result is wider, nor of
        booleans, whose sum is "or".
        """
        has_fractions = self.dtype.is_floating_point or self.dtype.is_complex
        return has_fractions and self.layout.pending in ("sum", "avg")

    @property
    def linear_layout(self) -> Layout:
        """Where a linear function needs it: as it is, or without what may not stay pending."""
        return self.layout if self.is_linear_sum else self.layout.bar


class Call(NamedTuple):
    """A call of a torch function, as a rule sees it."""

    function: Any
    args: tuple[Any, ...]  # with an `Operand` in place of every tensor, in lists too
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]  # all of them, in order of appearance
    ranks: tuple[int, ...]  # of the group, ascending
    rank: int  # this one, for the kernel; the layouts may not depend on it
    needs_grad: bool = False  # whether a gradient will be asked for; of rules that read it

    @property
    def name(self) -> str:
        """What the function is called."""
        return str(getattr(self.function, "__name__", self.function))

    def invoke(self, *tensors: torch.Tensor) -> Any:
        """What the function gives on these tensors in place of the operands."""
        given = {id(one): tensor for one, tensor in zip(self.operands, tensors, strict=True)}

        def placed(value: Any) -> Any:
            if isinstance(value, Operand):
                return given[id(value)]
            return [placed(one) for one in value] if type(value) is tuple else value

        kwargs = {name: placed(value) for name, value in self.kwargs.items()}
        return self.function(*map(placed, self.args), **kwargs)


class Need(NamedTuple):
    """In which layout a rule wants an operand.

    `work`, if there is any, says what the pieces are used for: it has the boxes of `layout`, and
    the entries that compute the same share a term ([Note: gradients] in `comm/differentiable.py`).
    A kernel gets one piece per entry of `work`, or else of `layout`, on its rank.
    """

    layout: Layout
    work: Layout | None = None


class Then(NamedTuple):
    """What a rank computes, at the end, of outputs that ranks have exchanged.

    The exchange is the function's own work, as that of `Decision.finish`.
    """

    needs: tuple[Need, ...]  # one per output of the decision
    outputs: tuple[Layout, ...]  # what the function returns
    kernel: Callable[[OperandPieces], OutputPieces]
    phantom: Callable[..., Any]  # as that of a decision, on a tie per output of the decision
    # Operands whose pieces, as the decision's kernel had them, kernel and phantom get at the end.
    operands: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """How a call is carried out on one rank."""

    needs: tuple[Need, ...]  # one per operand
    outputs: tuple[Layout, ...]  # one per tensor that the function returns
    kernel: Callable[[OperandPieces, Invoke], OutputPieces]
    # Where the outputs are brought at once, as part of the function's meaning.
    finish: tuple[Layout, ...] | None = None
    then: Then | None = None  # not with `finish`
    # On a rank that has none of the outputs the kernel does not run. This does, on a tensor without
    # elements per operand, and says by its results which dtypes they have; default: invoke.
    phantom: Callable[..., Any] | None = None
    is_one_call: bool = False  # whether the kernel on this rank is one `invoke` and no more
    # Whether each local piece of an output is made by `invoke`, from a piece of every operand.
    is_of_all: bool = False
    is_in_place: bool = False  # whether the function changes its first operand and returns it
    # Whether the outputs show the memory of the first operand; if that has to move, a copy of it.
    is_view: bool = False
    # What makes the one output of the one operand where a rank has one piece of each. For functions
    # that mean something else on a piece: `x.view(8, -1)`.
    local: Callable[[torch.Tensor], torch.Tensor] | None = None
    pack: Callable[[list[Any]], Any] | None = None  # several outputs -> what is returned; a tuple


@dataclass(frozen=True, slots=True)
class Rule:
    """How a torch function works on sharded tensors."""

    name: str
    # None: the rule does not cover the call, and it is computed by gathering.
    decide: Callable[[Call], Decision | None]
    # Whether numbers among the arguments matter to the decision (a dim does, a factor does not).
    reads_numbers: bool = True
    reads_grad: bool = False  # whether it matters if a gradient will be asked for
    # Whether torch is asked, on tensors of a few elements, if it takes these dtypes.
    asks_torch: bool = False
    # Position and name of the argument that, if plain, is this rank's rows of a batch.
    takes_rows: tuple[int, str] | None = None
    # What the function is in others that have rules, for calls that the rule does not cover.
    otherwise: Callable[..., Any] | None = None


class Composite(NamedTuple):
    """A torch function that is written in others that have rules."""

    name: str
    run: Callable[..., Any]  # takes what the function takes


# Module state, filled when this package is imported.
RULES: dict[Any, Rule] = {}
COMPOSITES: dict[Any, Composite] = {}  # torch function -> the same in functions that have rules


def register(rule: Rule, functions: Iterable[Any]) -> None:
    """Makes `rule` what these torch functions do; one that has a rule already keeps it."""
    for function in functions:
        if function not in COMPOSITES:
            RULES.setdefault(function, rule)


def composite(
    name: str, functions: Iterable[Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what these torch functions do, written in others that have rules."""

    def keep(run: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            if function in RULES or function in COMPOSITES:
                raise ArgumentTypeError(f"{function} has a rule already")
            COMPOSITES[function] = Composite(name, run)
        return run

    return keep
