"""The reports of all ranks on KV transfers become one."""

from __future__ import annotations

from pegboard.data.batch import TransferReport
from pegboard.data.transfers import TransferMerger


def report(*saved: str, loaded: tuple[str, ...] = (), **failed: int) -> dict[str, TransferReport]:
    return {"c": TransferReport(list(saved), list(loaded), failed)}


NOTHING = {"c": TransferReport([], [], {})}


def test_all_ranks_must_have_reported_possibly_in_different_steps() -> None:
    merger = TransferMerger(3)
    assert merger.take() == {}
    merger.add(0, report("a", "b", loaded=("a",)))
    merger.add(2, report("b"))
    assert merger.take() == NOTHING
    merger.add(1, report("b", "a", loaded=("a",)))
    assert merger.take() == report("b")
    merger.add(2, report("a", loaded=("a",)))
    assert merger.take() == report("a", loaded=("a",))
    assert merger.take() == NOTHING


def test_one_rank_needs_no_other() -> None:
    merger = TransferMerger(1)
    merger.add(0, report("a", loaded=("b",), d=4))
    assert merger.take() == report("a", loaded=("b",), d=4)


def test_a_load_that_failed_on_any_rank_has_failed_at_the_smallest_token() -> None:
    merger = TransferMerger(3)
    merger.add(0, report(loaded=("a",), b=32))
    merger.add(1, report(a=48, b=16))
    assert merger.take() == NOTHING
    merger.add(2, report(loaded=("b",), a=64))
    assert merger.take() == report(a=48, b=16)


def test_a_request_may_be_saved_again_before_the_first_save_has_ended_everywhere() -> None:
    merger = TransferMerger(2)
    merger.add(0, report("a"))
    merger.add(0, report("a"))
    merger.add(1, report("a"))
    assert merger.take() == report("a")
    merger.add(1, report("a"))
    assert merger.take() == report("a")


def test_connectors_do_not_mix() -> None:
    merger = TransferMerger(2)
    merger.add(0, {"c": TransferReport(["a"]), "d": TransferReport()})
    merger.add(1, {"c": TransferReport(), "d": TransferReport(["a"])})
    assert merger.take() == {**NOTHING, "d": TransferReport([], [], {})}
