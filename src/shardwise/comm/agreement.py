"""What all ranks must agree on, compared before anything moves."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from types import NoneType
from typing import TYPE_CHECKING, NoReturn, cast

import torch

from shardwise.comm.checks import check_timeout, should_check
from shardwise.comm.fingerprint import detailed, identity, shown
from shardwise.comm.heard import is_heard, note_heard
from shardwise.comm.tracing import is_watched, recorded
from shardwise.errors import AbsentRanksError, AgreementError
from shardwise.geometry import Layout
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardwise.comm.communicator import Communicator, EarlyFlight

__all__ = [
    "Agreement",
    "agree",
    "agreed_bytes",
    "agreed_numbers",
    "by_rank",
    "explain",
    "heard_by_all",
    "tell_all",
    "to_agree_on",
]

_PLAIN = frozenset({bool, int, str, NoneType, torch.dtype, torch.device, Layout})
_FEW = 16  # values of a call whose digest is kept
_DIGEST_BYTES = 16
_EARLY, _LATE = b"\1", b"\0"  # the last byte that is compared. [Note: early messages]
_SHOWN_LENGTH = 100
_PROBLEM_LENGTH = 400  # an error's end is where it says what to do
_CONTEXT = 20  # characters shown before the first difference of long texts
_LONGEST = 20_000  # of a text that is sent to be shown
# [Note: early messages] Their tags are the upper half of those there are.
_EARLY_TAG = 1 << 30
_NUM_MARKS = 1 << 20
_MOST_DISAGREEMENTS = 1 << 10


def agree(
    what: str,
    values: Mapping[str, object],
    *,
    group: Communicator,
    hot: bool = False,
    problem: Exception | None = None,
    phrases: Mapping[str, str] | None = None,
) -> None:
    """Returns once every rank of the group is known to have made this call with these values.

    All ranks call; one exchange of 16 bytes per rank, and none where `should_check(hot=hot)` is
    false. Values are compared by `fingerprint.identity`. On a difference every rank raises the
    same `AgreementError`, about the call `what`. `problem` is what this rank found wrong with its
    own arguments: this rank raises it, and the others an `AgreementError` that quotes it; where
    nothing is compared, they raise it once they have waited for this rank in vain.
    `phrases` are added to the message where a value of that name differs.
    """
    agreement = to_agree_on(what, values, group=group, hot=hot, problem=problem, phrases=phrases)
    if agreement is not None:
        agreement.reach()


def to_agree_on(
    what: str,
    values: Mapping[str, object],
    *,
    group: Communicator,
    hot: bool = False,
    problem: Exception | None = None,
    phrases: Mapping[str, str] | None = None,
) -> Agreement | None:
    """As `agree`, which `reach` of the result does; None where nothing is compared.

    What comes next is prepared before, or even sent, see `Agreement.flight`. A `problem` is raised
    here.
    """
    is_known = problem is not None and is_heard(problem, group.ranks, "all")
    if len(group.ranks) == 1 or is_known or not should_check(hot=hot):
        if problem is None:
            return None
        if len(group.ranks) > 1 and not is_known:
            group.tell(problem)  # [Note: who raised] in `watch.py`
            note_heard(problem, group.ranks, "a notice")
        raise problem
    agreement = Agreement(what, values, group, None, phrases)
    if problem is not None:
        agreement.fail(problem)
    return agreement


class Agreement:
    """What all ranks of a group are to agree on.

    [Note: early messages] Messages of what is to be agreed on may leave before the digests, since
    the wait for these is as long as a small exchange; the digests follow. Such a message has a tag
    that is made of its sender's digest, so it lands only where the receiver has the same. Once
    ranks are known to differ, each waits for the messages between it and those of its own digest
    that have early ones too, which the last of the compared bytes says, leaves the others, which
    nothing will ever meet, and raises. Tags of a later agreement are different ones, because they
    contain how often ranks have differed, which all know. So the same call can be agreed on again
    by the same object.
    """

    __slots__ = ("_group", "_mark", "_own", "_phrases", "_problem", "_values", "_what")

    def __init__(
        self,
        what: str,
        values: Mapping[str, object],
        group: Communicator,
        problem: Exception | None,
        phrases: Mapping[str, str] | None,
    ) -> None:
        self._what, self._values, self._group = what, values, group
        self._problem, self._phrases = problem, phrases
        self._own = _digest(what, values, problem)[:-1]  # all but the byte that says who is early
        self._mark = int.from_bytes(self._own[:4]) % _NUM_MARKS

    @property
    def apart(self) -> Communicator:
        """The group, for all flights of what is to be agreed on. [Note: early messages]"""
        tag = self._tag()
        return self._group if tag is None else self._group.apart(tag)

    def flight(self) -> EarlyFlight | None:
        """The first of these flights, which need not wait; None where it must."""
        tag = self._tag()
        return None if tag is None else self._group.early_flight(tag, self._own + _EARLY)

    def _tag(self) -> int | None:
        count = self._group.num_disagreements
        has_tag = count < _MOST_DISAGREEMENTS
        return _EARLY_TAG + count * _NUM_MARKS + self._mark if has_tag else None

    def reach(self, flight: EarlyFlight | None = None) -> None:
        """Returns once all ranks have agreed, or raises; `flight` is what flies already."""
        own, group = self._own, self._group
        try:
            if is_watched():
                with recorded("compare arguments", group, _DIGEST_BYTES):
                    digests = self._everybodys(flight)
            else:
                digests = self._everybodys(flight)
        except AbsentRanksError as error:
            error.add_note(f"Compared were the arguments of {self._what}.")
            raise
        if all([digest.startswith(own) for digest in digests]):
            return
        group.num_disagreements += 1
        if flight is not None:
            named = zip(group.ranks, digests, strict=True)
            flight.leave([rank for rank, digest in named if digest != own + _EARLY])
        explain(
            self._what,
            self._values,
            group=group,
            problem=self._problem,
            phrases=self._phrases,
        )

    def fail(self, problem: Exception) -> NoReturn:
        """Instead of `reach`, and before anything has left: raises as `agree` does of a problem."""
        Agreement(self._what, self._values, self._group, problem, self._phrases).reach()
        raise problem  # all ranks have the same one

    def _everybodys(self, flight: EarlyFlight | None) -> list[bytes]:
        timeout = check_timeout()
        if flight is None:
            return self._group.compare(self._own + _LATE, timeout=timeout)
        return flight.compared(timeout=timeout)


@contextmanager
def heard_by_all(what: str, group: Communicator, *, hot: bool = True) -> Iterator[None]:
    """What raises in this block, before the call `what` exchanges anything, raises on all ranks."""
    try:
        yield
    except Exception as error:
        if hot:
            tell_all(what, error, group)
        else:
            agree(what, {}, group=group, problem=error)
        raise


def tell_all(what: str, problem: Exception, group: Communicator, *, hot: bool = True) -> None:
    """What has raised here in `what`, which all ranks call, perhaps raises nowhere else: say so.

    At once where ranks compare in `what`, or in what they do next; else to those that wait for this
    rank. `hot` as in `agree`. Once, and nothing of what this rank has heard of others. Raises
    nothing itself.
    """
    if isinstance(problem, AgreementError | AbsentRanksError):
        return
    if is_heard(problem, group.ranks, "a notice") or is_heard(problem, group.ranks, "all"):
        return
    try:
        agree(what, {}, group=group, hot=hot, problem=problem)
    except AbsentRanksError as error:  # the others had nothing left to compare
        problem.add_note(str(error))
    except Exception as error:
        if error is not problem:  # the caller raises that one
            problem.add_note(f"The other ranks were not told: {error}")


def agreed_numbers(
    what: str,
    values: Mapping[str, object],
    number: int,
    *,
    group: Communicator,
    doing: str = "compare arguments",
    problem: Exception | None = None,
    phrases: Mapping[str, str] | None = None,
) -> tuple[int, ...]:
    """As `agree`, and every rank's own `number`, in order of group rank.

    One exchange of 16 bytes per rank whatever is set to be compared, since the numbers are needed.
    `doing` is its name in a trace.
    """
    found = agreed_bytes(
        what,
        values,
        number.to_bytes(8),
        group=group,
        doing=doing,
        problem=problem,
        phrases=phrases,
    )
    return tuple(map(int.from_bytes, found))


def agreed_bytes(
    what: str,
    values: Mapping[str, object],
    mine: bytes,
    *,
    group: Communicator,
    doing: str = "compare arguments",
    problem: Exception | None = None,
    phrases: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[bytes]:
    """As `agreed_numbers`, with bytes of every rank, of one length.

    `timeout` is how many seconds to wait for ranks that have not come; by default what is set.
    """
    if problem is not None and is_heard(problem, group.ranks, "all"):
        raise problem
    sent = mine + _digest(what, values, problem)[:8]
    is_alone = len(group.ranks) == 1
    try:
        with recorded(doing, group, len(sent)):
            limit = check_timeout() if timeout is None else timeout
            found = [sent] if is_alone else group.compare(sent, timeout=limit)
    except AbsentRanksError as error:
        error.add_note(f"Compared were the arguments of {what}.")
        raise
    if problem is not None or any(one[-8:] != sent[-8:] for one in found):
        explain(what, values, group=group, problem=problem, phrases=phrases)
    return [one[:-8] for one in found]


def explain(
    what: str,
    values: Mapping[str, object],
    *,
    group: Communicator,
    problem: Exception | None = None,
    phrases: Mapping[str, str] | None = None,
) -> None:
    """Raises what `agree` does on a difference. All ranks call it, once all know of one."""
    stories = _stories(what, values, group=group, problem=problem)
    try:
        _raise(stories, problem, phrases or {})
    except Exception as error:
        note_heard(error, group.ranks, "all")
        raise


@dataclass(frozen=True, slots=True)
class _Story:
    """What one rank brought, sent to all when something differs."""

    rank: int
    call: str
    values: dict[str, tuple[str, str, str]]  # name -> digest of its identity, texts to show
    problem: str | None


def _digest(what: str, values: Mapping[str, object], problem: Exception | None) -> bytes:
    """What stands for a call when ranks compare; remembered, if nothing in it can change."""
    if problem is None and len(values) <= _FEW and all(map(_is_plain, values.values())):
        # The types too, since 1 == True.
        return _known_digest(what, tuple(values.items()), tuple(map(type, values.values())))
    return _new_digest(what, values, problem)


def _is_plain(value: object) -> bool:
    """Whether it is small, has a hash, and never changes."""
    if type(value) in (tuple, torch.Size):
        return all([type(one) is int for one in cast("tuple[object, ...]", value)])
    return type(value) in _PLAIN


@lru_cache(maxsize=256)
def _known_digest(
    what: str, values: tuple[tuple[str, object], ...], types: tuple[type, ...]
) -> bytes:
    """Ranks that compare once will often compare the same again."""
    return _new_digest(what, dict(values), None)


def _new_digest(what: str, values: Mapping[str, object], problem: Exception | None) -> bytes:
    texts = [what, _problem_text(problem) or ""]
    known: dict[int, str] = {}  # thousands of tensors have few layouts
    for name in sorted(values):
        value = values[name]
        text = known.get(id(value))
        if text is None:
            text = known[id(value)] = identity(value)
        texts += name, text
    # With their lengths, so that no two lists of texts run together into the same bytes.
    joined = "".join([f"{len(text)}:{text}" for text in texts])
    return hashlib.blake2b(
        joined.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES
    ).digest()


def _problem_text(problem: Exception | None) -> str | None:
    return None if problem is None else f"{type(problem).__name__}: {problem}"


def _stories(
    what: str, values: Mapping[str, object], *, group: Communicator, problem: Exception | None
) -> list[_Story]:
    texts = {
        name: (
            _new_digest(identity(value), {}, None).hex(),
            shown(value)[:_LONGEST],
            detailed(value)[:_LONGEST],
        )
        for name, value in values.items()
    }
    own = _Story(group.rank, what, texts, _problem_text(problem))
    return [story for story in group.gather_objects(own) if isinstance(story, _Story)]


def _raise(stories: list[_Story], problem: Exception | None, phrases: Mapping[str, str]) -> None:
    """Raises the own `problem`, or what is to be said about all ranks."""
    if problem is not None:
        raise problem
    failed = [story for story in stories if story.problem is not None]
    if failed:  # which others may notice in another call
        faulty = [(s.rank, str(s.problem), str(s.problem)) for s in failed]
        raise AgreementError(
            f"{' and '.join(sorted({story.call for story in failed}))} failed on other ranks: "
            f"{by_rank(faulty, length=_PROBLEM_LENGTH)}",
            fix="It was stopped on all ranks, and nothing was changed but what it was to fill.",
        )
    calls = {story.call for story in stories}
    if len(calls) > 1:
        raise AgreementError(
            f"ranks made different calls: {by_rank((s.rank, s.call, s.call) for s in stories)}",
            fix="Every rank of the group must make the same calls in the same order.",
        )
    (call,) = calls
    names = dict.fromkeys(name for story in stories for name in story.values)
    differing = []
    for name in names:
        found = [(s.rank, *s.values.get(name, ("", "(absent)", "(absent)"))) for s in stories]
        digests = {digest for _, digest, _, _ in found}
        if len(digests) > 1:
            looks_alike = len({text for _, _, text, _ in found}) < len(digests)
            texts = [(r, digest, long if looks_alike else text) for r, digest, text, long in found]
            phrase = f"; {phrases[name]}" if name in phrases else ""
            differing.append(f"{name} ({by_rank(texts)}{phrase})")
    raise AgreementError(
        f"{call}: ranks differ in {', '.join(differing)}",
        fix="Pass the same on every rank of the group.",
    )


def by_rank(found: Iterable[tuple[int, str, str]], *, length: int = _SHOWN_LENGTH) -> str:
    """`ranks 0, 2: (4, 6); rank 1: (4, 5)` of (rank, what to tell apart by, text)."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    texts: dict[str, str] = {}
    for rank, key, text in found:
        ranks[key].append(rank)
        texts[key] = text
    columns = zip(*texts.values(), strict=False)
    alike = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    is_long = len(texts) > 1 and max(map(len, texts.values())) > length
    start = max(0, alike - _CONTEXT) if is_long else 0
    cut = {key: _cut(text, start, length) for key, text in texts.items()}
    if len(set(cut.values())) < len(cut):  # as shown they do not differ, so show that they do
        cut = {key: f"{text} [{key[:8]}]" for key, text in cut.items()}
    return "; ".join(f"{ranks_text(ranks[key])}: {cut[key]}" for key in cut)


def _cut(text: str, start: int, length: int) -> str:
    end = start + length
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
