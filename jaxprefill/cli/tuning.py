"""The work of `jaxprefill tune`: measures with a model on the device, and shows what it found.

It imports jax, so the command imports it when it runs.
"""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.filesize import decimal

from jaxprefill.cli.streams import emit, emit_json, note
from jaxprefill.cli.tables import emit_table
from jaxprefill.config import EngineConfig
from jaxprefill.errors import RequestError
from jaxprefill.kernels.device import chip_name, describe_device
from jaxprefill.plan import EnginePlan, make_plan
from jaxprefill.prefill.buckets import cut_ladder, upstream_buckets
from jaxprefill.prefill.compiler import ExecutableRecord
from jaxprefill.tuning.chosen import TunedLadder, keep, user_results
from jaxprefill.tuning.costs import BucketCost
from jaxprefill.tuning.ladder import Expectation, Goal, expect
from jaxprefill.tuning.lengths import (
    DISTRIBUTIONS,
    Distribution,
    named,
    read_lengths,
    read_prompts,
    within,
)
from jaxprefill.tuning.measure import ShapeMeasurer
from jaxprefill.tuning.search import Found, search
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.locate import open_checkpoint


def tune(config: EngineConfig, goal: Goal, args: argparse.Namespace) -> int:
    """See `jaxprefill.cli.tune.run`."""
    checkpoint = open_checkpoint(config.model)
    plan = make_plan(replace(config, compile_cache="off"), checkpoint.config, describe_device())
    distribution = _distribution(args, checkpoint, plan)
    goal = replace(goal, split_above=plan.limits.split_above)
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > num_cores:
        busy = (
            f"other work slows this machine (load {load:.1f} on {num_cores} cores): what is "
            "measured now may not hold"
        )
        if args.write and not args.force:
            raise RequestError(f"{busy}, and is not kept; wait, or insist with --force")
        note(busy)
    if not args.quiet:
        note(
            f"measures buckets up to {plan.chunked_prefill_size} tokens, for about "
            f"{args.time_limit} s at most (--time-limit)"
        )
    found = _measure(checkpoint, plan, distribution, goal, args)
    rows = _compared(found, plan, distribution, goal)
    chosen = found.proposal.chosen
    if args.json:
        emit_json(_record(found, rows, distribution, goal, config.model))
    else:
        _show(found, rows, distribution, goal)
    if args.write:
        tuned = TunedLadder(
            buckets=chosen.buckets,
            distribution=distribution.name,
            waste=chosen.waste,
            budget=goal.budget,
        )
        keep(tuned, checkpoint.config, plan, user_results())
    if not args.quiet:
        _tell(found, distribution, goal, is_written=args.write)
    return 0 if found.proposal.is_within_budget else 1


def _distribution(
    args: argparse.Namespace, checkpoint: Checkpoint, plan: EnginePlan
) -> Distribution:
    if args.lengths is not None:
        found = read_lengths(args.lengths)
    elif args.prompts is not None:
        found = read_prompts(args.prompts, checkpoint.tokenizer)
    else:
        found = named(args.distribution or DISTRIBUTIONS[0], plan.context_length)
    return within(found, plan.context_length)


def _measure(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    distribution: Distribution,
    goal: Goal,
    args: argparse.Namespace,
) -> Found:
    shapes = None if plan.config.prefill_buckets == "auto" else plan.ladder.buckets
    tell = (None, None) if args.quiet else (_tell_compiled, _tell_measured)
    measurer = ShapeMeasurer(checkpoint, plan, on_compiled=tell[0], on_measured=tell[1])
    try:
        return search(
            measurer,
            distribution.lengths,
            goal,
            top=plan.chunked_prefill_size,
            default=plan.default_buckets,
            shapes=shapes,
            limit_s=args.time_limit,
        )
    finally:
        measurer.close()


def _tell_compiled(record: ExecutableRecord) -> None:
    note(f"compiled {record.name} in {record.lower_s + record.compile_s:.1f} s")


def _tell_measured(cost: BucketCost) -> None:
    note(f"measured {cost.num_tokens} tokens: {cost.time_ns / 1e6:.2f} ms")


def _compared(
    found: Found, plan: EnginePlan, distribution: Distribution, goal: Goal
) -> dict[str, Expectation]:
    """The chosen ladder beside the default and SGLang's."""
    top = plan.chunked_prefill_size
    others = {"default": plan.default_buckets, "upstream": cut_ladder(upstream_buckets(top), top)}
    return {"tuned": found.proposal.chosen} | {
        name: expect(found.curve, distribution.lengths, buckets, split_above=goal.split_above)
        for name, buckets in others.items()
    }


def _show(
    found: Found, rows: dict[str, Expectation], distribution: Distribution, goal: Goal
) -> None:
    lengths = distribution.lengths
    num_prompts = sum(lengths.values())
    emit(
        f"{distribution.name}: {num_prompts} prompts of {min(lengths)} to {max(lengths)} tokens; "
        f"budget {goal.budget:.1%}\n"
    )
    columns = (">buckets", ">waste", ">padding", ">ms a request", ">compile s", ">bytes")
    emit_table(("ladder", *columns), ((name, *_cells(row)) for name, row in rows.items()))
    by_size = found.proposal.by_size
    emit("the best ladder of each size\n")
    emit_table((*columns, "ladder"), ((*_cells(row), _joined(row.buckets)) for row in by_size))
    emit(f"--prefill-buckets {_joined(found.proposal.chosen.buckets)}\n")


def _cells(row: Expectation) -> tuple[str, ...]:
    sign = "" if row.is_measured else "~"  # some costs are interpolated
    return (
        str(len(row.buckets)),
        f"{sign}{row.waste:.1%}",
        f"{row.padding:.1%}",
        f"{sign}{row.ms_per_request:.2f}",
        f"{sign}{row.compile_s:.1f}",
        f"{sign}{decimal(row.num_bytes)}",
    )


def _tell(found: Found, distribution: Distribution, goal: Goal, *, is_written: bool) -> None:
    if distribution.num_left_out:
        note(
            f"{distribution.num_left_out} prompts are longer than the context, and left out: an "
            "engine refuses them"
        )
    if not found.proposal.is_within_budget:
        note(
            f"no ladder of these buckets keeps to a waste of {goal.budget:.1%}; the least "
            "wasteful is shown"
        )
    if found.unmeasured:
        note(
            f"costs of {_joined(found.unmeasured)} are interpolated, for want of time; a longer "
            "--time-limit measures them"
        )
    if is_written:
        note("kept for this model and chip; engines take it unless prefill_buckets is set")


def _record(
    found: Found,
    rows: dict[str, Expectation],
    distribution: Distribution,
    goal: Goal,
    model: str,
) -> dict[str, Any]:
    return {
        "model": model,
        "chip": chip_name(),
        "distribution": distribution.name,
        "num_prompts": sum(distribution.lengths.values()),
        "num_left_out": distribution.num_left_out,
        "budget": goal.budget,
        "max_buckets": goal.max_buckets,
        "split_above": goal.split_above if math.isfinite(goal.split_above) else None,
        "is_within_budget": found.proposal.is_within_budget,
        "buckets": list(found.proposal.chosen.buckets),
        "ladders": {name: asdict(row) for name, row in rows.items()},
        "by_size": [asdict(row) for row in found.proposal.by_size],
        "measured": [asdict(cost) for cost in found.curve.costs],
    }


def _joined(buckets: Sequence[int]) -> str:
    return ",".join(map(str, buckets))
