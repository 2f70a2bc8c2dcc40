"""Executables as a notebook or the command line asks for them: of a store, a server or a model.

    from jaxprefill.inspection.sources import analysed, open_store
    from jaxprefill.inspection.summary import operations, summarise

    source = open_store("executables/")  # or open_model("demo", prefill_buckets=(32, 128))
    pandas.DataFrame(summarise(analysed(source, name)).as_dict() for name in source.names)
    pandas.DataFrame(each.as_dict() for each in operations(analysed(source, "greedy")))
    print(source.open("prefill 32x16x8192").text("hlo"))

`inspection.diff.compare` takes two of `analysed`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxprefill.config import make_config
from jaxprefill.errors import InspectionError
from jaxprefill.inspection.calls import Calls
from jaxprefill.inspection.model import JobSource, ModelSource, distant_chip, load_hlo
from jaxprefill.inspection.select import Source, select_one
from jaxprefill.inspection.served import ServerSource
from jaxprefill.inspection.stored import StoreSource
from jaxprefill.inspection.summary import Analysis, analyse


def open_store(folder: str | Path, *, is_trusted: bool = False) -> StoreSource:
    """What `jaxprefill compile` or an engine wrote into a folder.

    Raises:
        StoreError: there is no such store, or others could have written into it.
        InspectionError: it is empty.
    """
    return StoreSource(folder, find_chip=distant_chip, load=load_hlo, is_trusted=is_trusted)


def open_server(url: str, *, api_key: str | None = None) -> ServerSource:
    """What a running server has.

    Raises:
        ConfigError: that is no URL.
        InspectionError: it does not answer, or is no server of jaxprefill's.
    """
    return ServerSource(url, find_chip=distant_chip, api_key=api_key)


def open_model(model: str = "demo", **options: Any) -> ModelSource:
    """What an engine with these options would have, each compiled when it is asked for.

    Raises:
        ConfigError: options contradict the model or each other.
        CheckpointError: the model cannot be had.
    """
    return ModelSource(make_config(model=model, **options))


def analysed(source: Source, key: str, *, repeats: int = 0) -> Analysis:
    """The one executable that a key means, read; with its time where it is to be run so often.

    Raises:
        RequestError: there is none, or several.
        InspectionError: it cannot be had, or run.
        CompileError: it could not be compiled.
    """
    name = select_one(source.names, key)
    one = source.open(name)
    if repeats:
        one = replace(one, measured_s=calls_of(source, name).median_s(repeats))
    return analyse(one)


def calls_of(source: Source, key: str) -> Calls:
    """Runs of an executable of a model, to time or to trace it.

    Raises:
        RequestError: there is none, or several.
        InspectionError: it is not a model's.
        CompileError: it could not be compiled.
    """
    if not isinstance(source, JobSource):
        raise InspectionError(
            "executables are run only where they were compiled just now; name a --model instead"
        )
    return source.calls(select_one(source.names, key))
