"""Which module may import which: one way down, no cycle, host modules free of jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxprefill

ROOT = Path(jaxprefill.__file__).parent
TOP_LEVEL = {
    "jaxprefill",
    "checkpoints",
    "tests",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "LICENSE",
}

# Layers from the bottom up; a module may import its own layer and those below.
LAYERS = [
    ["errors", "integers", "grammar", "options", "logs", "threads"],
    ["config", "latent_config", "moe_config", "request", "counters"],
    ["batch", "chat_template", "tokenizer", "updates", "constraints"],
    ["kernels", "compat", "processes", "store"],
    ["cache.pages", "cache.recent", "cache.prefix", "cache.spec"],
    ["models"],
    ["cache", "weights", "device_state"],
    ["prefill", "decode", "sampling", "scheduler"],
    ["tuning", "remote.spawn"],
    ["plan", "tuning.chosen", "admission", "collector", "embeddings", "client"],
    ["arguments", "resolved"],
    ["reranking"],
    ["readings"],
    ["server"],  # it sees engines through `client` alone
    ["offline"],  # and so does this, through `server`
    ["step"],
    ["core"],
    ["loop"],
    ["assembly", "fingerprint"],
    ["tuning.measure", "inspection"],
    ["warming"],
    ["startup"],
    ["precompile"],
    ["engine"],
    ["remote", "offline.lm_eval", "offline.ray_data"],
    ["cli"],
    ["__main__"],
]
HOST_ONLY = [
    "errors",
    "integers",
    "logs",
    "options",
    "threads",
    "config",
    "latent_config",
    "moe_config",
    "request",
    "batch",
    "counters",
    "tokenizer",
    "admission",
    "arguments",
    "collector",
    "embeddings",
    "reranking",
    "readings",
    "models.hf_heads",
    "scheduler",
    *(f"inspection.{name}" for name in ("diff", "findings", "fold", "summary", "text")),
    "cache.pages",
    "cache.prefix",
    "cache.recent",
    "cache.spec",
    "prefill.backend",
    "prefill.buckets",
    "prefill.contexts",
    "prefill.policy",
    "prefill.transport",
    "prefill.vote",
    "tuning.search",
    "tuning.lengths",
    "sampling.pack",
    "models.hf_config",
    "models.hf_rope",
    "models.hf_values",
    "models.rope",
    "weights.known",
    "constraints",
    "store",
    "store.files",
    "store.manifest",
    "store.folder",
    "store.machine",
    "server.run",
    "offline.batch",
    "remote.client",
    "remote.spawn",
    "cli.main",
    "cli.serving",
    "cli.offline",
]
MAY_IMPORT_LATE = {"cli"}  # so that --help and --version need not wait for jax


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module) -> set[str]:
    """Modules of the package that are imported anywhere, in functions and for types included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxprefill"):
            base = node.module.removeprefix("jaxprefill").lstrip(".")
            for alias in node.names:
                names.add(f"{base}.{alias.name}".lstrip("."))
                names.add(base)
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("jaxprefill.")
                for alias in node.names
                if alias.name.startswith("jaxprefill.")
            }
    return names & set(MODULES) - {""}


MODULES = modules()
GRAPH = {name: imports(tree) for name, tree in MODULES.items()}


def layer_of(name: str) -> int:
    """The layer of the longest listed prefix."""
    matches = [
        (len(entry), index)
        for index, layer in enumerate(LAYERS)
        for entry in layer
        if name == entry or name.startswith(entry + ".")
    ]
    assert matches, f"{name} is in no layer: add it to LAYERS"
    return max(matches)[1]


@pytest.mark.parametrize("name", sorted(set(MODULES) - {""}))
def test_imports_go_down(name):
    for target in GRAPH[name]:
        assert layer_of(target) <= layer_of(name), f"{name} imports upward: {target}"


def test_there_is_no_cycle():
    order, state = [], {}

    def visit(name, trail):
        assert state.get(name) != "open", f"import cycle: {' -> '.join([*trail, name])}"
        if name not in state:
            state[name] = "open"
            for target in sorted(GRAPH[name] - {name}):
                # A package's facade is an alias for its parts, not a step of a cycle.
                if not name.startswith(target + "."):
                    visit(target, [*trail, name])
            state[name] = "done"
            order.append(name)

    for name in MODULES:
        visit(name, [])
    assert len(order) == len(MODULES)


@pytest.mark.parametrize("name", HOST_ONLY)
def test_host_modules_do_not_import_jax(name):
    code = f"import sys, jaxprefill.{name}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_type_checking_is_no_way_round():
    for name, tree in MODULES.items():
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert "TYPE_CHECKING" not in used, name


def test_imports_stand_at_the_top_but_where_they_are_lazy_on_purpose():
    for name, tree in MODULES.items():
        if name.split(".")[0] in MAY_IMPORT_LATE:
            continue
        late = [
            node.lineno
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert not late, f"{name} imports inside functions at lines {late}"


def test_private_jax_is_not_used():
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            module = getattr(node, "module", None) or ""
            assert not module.startswith("jax._src"), name


def test_sizes_stay_readable():
    for path in ROOT.rglob("*.py"):
        limit = 600 if "kernels" in path.parts else 400
        assert len(path.read_text().splitlines()) <= limit, path
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                limit = 120 if name.startswith("kernels") else 50
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= limit, f"{name}.{node.name} has {length} lines"


def test_the_top_level_holds_what_it_should():
    here = {path.name for path in ROOT.parent.iterdir() if not path.name.startswith(".")}
    ignored = {"build", "dist"}
    assert {name for name in here - ignored if not name.endswith(".egg-info")} <= TOP_LEVEL
