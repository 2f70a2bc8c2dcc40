"""The plan of an engine, with the ladder that was tuned for its model and chip where there is one.

A tuned ladder is kept as a small result of a store. It is taken where the user named no buckets
and everything it was measured under still holds; otherwise a warning says what does not.
"""

import dataclasses
import hashlib
import json
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, cast

import jax

from jaxprefill.config import EngineConfig, ModelConfig
from jaxprefill.kernels.device import DeviceInfo, chip_name
from jaxprefill.plan import EnginePlan, make_plan
from jaxprefill.store.folder import Store
from jaxprefill.store.machine import user_store

logger = logging.getLogger(__name__)

KIND = "ladder"
_FORMAT = 1


class Results(Protocol):
    """Where small results are kept, each with the facts it holds for: a `Store`."""

    def has_result(self, kind: str, facts: dict[str, Any]) -> bool:
        """Whether anything was written for these facts, damaged or not."""
        ...

    def read_result(self, kind: str, facts: dict[str, Any]) -> Any:
        """What was written for these facts, or None."""
        ...

    def results(self, kind: str) -> list[tuple[dict[str, Any], Any]]:
        """All of a kind, each with the facts for which it holds."""
        ...

    def write_result(self, kind: str, facts: dict[str, Any], value: Any) -> None:
        """Keeps a JSON value for these facts."""
        ...


@dataclass(frozen=True, kw_only=True)
class TunedLadder:
    """A ladder, and where it comes from.

    Attributes:
        distribution: what it was made for.
        waste, budget: as expected, and as asked for.
        written: the day.
    """

    buckets: tuple[int, ...]
    distribution: str
    waste: float
    budget: float
    written: str = ""


def choose_plan(
    config: EngineConfig, model: ModelConfig, device: DeviceInfo, results: Results | None
) -> EnginePlan:
    """`make_plan`, with the tuned ladder of `results` where the user named no buckets.

    Raises:
        ConfigError: as `make_plan`.
        KernelUnsupported: as `make_plan`.
    """
    plan = make_plan(config, model, device)
    is_open = config.prefill_buckets == "auto" and config.prefill_backend != "eager"
    facts = facts_of(model, config.tensor_parallel_size)
    if results is None or not is_open:
        return plan
    if not results.has_result(KIND, facts):
        if _is_of_before(config.model, facts, results):
            logger.warning(
                "%s is not as it was when its buckets were tuned, or jaxprefill reads it "
                "otherwise: the default ones are taken; `jaxprefill tune --write` tunes anew",
                config.model,
            )
        return plan
    try:
        tuned = _parse(results.read_result(KIND, facts), plan)
    except ValueError as error:
        logger.warning("the buckets that `jaxprefill tune` chose are left out, as %s", error)
        return replace(plan, ladder_origin=f"default; the tuned ones are left out, as {error}")
    plan = make_plan(replace(config, prefill_buckets=tuned.buckets), model, device)
    origin = f"tuned for {tuned.distribution} on {tuned.written}"
    logger.info("prefill buckets %s: %s", plan.ladder.buckets, origin)
    return replace(plan, ladder_origin=origin)


def user_results() -> Store:
    """The user's own store."""
    return Store(user_store())


def keep(tuned: TunedLadder, model: ModelConfig, plan: EnginePlan, results: Results) -> None:
    """Stores a ladder for the model and this chip, in place of an earlier one.

    Raises:
        StoreError: it cannot be written.
    """
    day = datetime.now(UTC).date().isoformat()
    value = dataclasses.asdict(replace(tuned, written=day))
    value |= {"format": _FORMAT, "conditions": conditions_of(plan), "name": plan.config.model}
    results.write_result(KIND, facts_of(model, plan.config.tensor_parallel_size), value)


def facts_of(model: ModelConfig, num_devices: int) -> dict[str, Any]:
    """What a tuned ladder is found by: the model's architecture and sizes, chip and devices."""
    text = json.dumps(dataclasses.asdict(model), sort_keys=True)
    return {
        "model": hashlib.sha256(text.encode()).hexdigest(),
        "chip": chip_name(),
        "devices": num_devices,
    }


def _is_of_before(name: str, facts: dict[str, Any], results: Results) -> bool:
    """Whether a ladder was kept for a model of this name that was another one."""
    return any(
        isinstance(value, dict)
        and cast(dict[str, Any], value).get("name") == name
        and other | {"model": facts["model"]} == facts
        for other, value in results.results(KIND)
    )


def conditions_of(plan: EnginePlan) -> dict[str, Any]:
    """What a ladder's costs depend on beside model and chip."""
    return {
        "dtype": plan.dtype.name,
        "attention_backend": str(plan.attention),
        "prefill_backend": plan.path,
        "chunked_prefill_size": plan.chunked_prefill_size,
        "jax": jax.__version__,
    }


def _parse(value: Any, plan: EnginePlan) -> TunedLadder:
    """Raises ValueError, with the reason, where it is damaged or stale."""
    if not isinstance(value, dict):
        raise ValueError("their record is damaged")
    record = cast(dict[str, Any], value)
    conditions: Any = record.get("conditions")
    if record.get("format") != _FORMAT or not isinstance(conditions, dict):
        raise ValueError("their record is damaged, or of another version of jaxprefill")
    found = cast(dict[str, Any], conditions)
    for name, now in conditions_of(plan).items():
        if found.get(name) != now:
            raise ValueError(f"they were measured with {name} {found.get(name)}, and it is {now}")
    buckets: Any = record.get("buckets")
    is_list = isinstance(buckets, list) and all(type(bucket) is int for bucket in buckets)
    if not is_list or not buckets or min(buckets) < 1 or max(buckets) != plan.chunked_prefill_size:
        raise ValueError(f"their record is damaged: its buckets are {buckets!r}")
    return TunedLadder(
        buckets=tuple(buckets),
        distribution=str(record.get("distribution")),
        waste=float(record.get("waste", 0)),
        budget=float(record.get("budget", 0)),
        written=str(record.get("written")),
    )
