"""The rules of the house, checked on the code: who may import what, who may confirm, what must be documented."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay import errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "relay"
MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}

PURE = (
    "backoff.py",
    "body.py",
    "event.py",
    "lsn.py",
    "outbox.py",
    "presets.py",
    "routing.py",
    "sink/kafka_blocking.py",
    "sink/kafka_contacts.py",
    "sink/kafka_marks.py",
    "sink/kafka_partition.py",
    "sink/subjects.py",
    "source/decoder.py",
    "source/pgoutput.py",
    "source/wal2json.py",
)
TOOLS = ("embedded/", "demo/", "bench/")  # programs around the relay: they bring their own clients


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names of everything that is imported, wherever: `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(*packages: str) -> dict[str, set[str]]:
    """Module → what it imports of these packages."""
    found: dict[str, set[str]] = {}
    for module, tree in MODULES.items():
        names = {name for name in imports(tree) if name.split(".")[0] in packages}
        if names:
            found[module] = names
    return found


def test_the_package_was_found() -> None:
    assert {"pipeline.py", "source/stream.py", "sink/__init__.py"} <= set(MODULES)


@pytest.mark.guarantee("G1")
def test_only_the_checkpointer_confirms() -> None:
    callers = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "confirm"
    }
    assert callers == {"checkpointer.py"}


@pytest.mark.guarantee("G1")
def test_a_status_with_a_confirmed_lsn_is_sent_only_by_the_stream_source() -> None:
    callers = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "send_status"
    }
    assert callers == {"source/stream.py"}


def test_only_the_config_reads_the_environment() -> None:
    readers = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    }
    assert readers == {"config/environment.py"}


def test_metrics_are_defined_in_one_place() -> None:
    found = importers("prometheus_client")
    assert found.pop("admin/exposition.py")
    for module, names in found.items():
        assert module.startswith("admin/"), module
        assert all(name.startswith("prometheus_client.exposition") for name in names), module


def test_postgres_is_spoken_to_only_at_the_edge() -> None:
    """Elsewhere statements are composed (`psycopg.sql`), but nobody connects, and nobody catches psycopg's errors."""
    for module, names in importers("psycopg", "psycopg2", "asyncpg").items():
        if module.startswith(("source/", *TOOLS)) or module == "inbox.py":  # the consumer's side, on its connections
            continue
        if module.startswith("config/"):
            assert names <= {
                "psycopg.ProgrammingError",
                "psycopg.conninfo.conninfo_to_dict",
                "psycopg.conninfo.make_conninfo",
            }
        else:
            assert names == {"psycopg.sql"}, module


def test_brokers_are_spoken_to_only_at_the_edge() -> None:
    for module in importers("nats", "nkeys", "confluent_kafka"):
        assert module.startswith(("sink/", *TOOLS)), module


def test_the_wings_do_not_know_each_other() -> None:
    for module, names in importers("relay").items():
        if module.startswith("source/"):
            assert not any(name.startswith("relay.sink") for name in names), module
        if module.startswith("sink/"):
            assert not any(name.startswith("relay.source") for name in names), module


def test_the_relay_does_not_depend_on_the_programs_around_it() -> None:
    for module, names in importers("relay").items():
        if module.startswith(TOOLS) or module in ("cli.py", "cli_bench.py"):
            continue
        assert not any(name.startswith(("relay.embedded", "relay.demo", "relay.bench")) for name in names), module


@pytest.mark.parametrize("module", PURE)
def test_the_core_is_pure(module: str) -> None:
    """No loop, no clock, no chance, no files, no servers: what it needs is passed in."""
    impure = {
        "asyncio",
        "time",
        "random",
        "os",
        "socket",
        "threading",
        "psycopg",
        "nats",
        "confluent_kafka",
        "structlog",
    }
    assert not {name.split(".")[0] for name in imports(MODULES[module])} & impure


def test_the_checkpoint_knows_no_loop_and_no_clock() -> None:
    assert not {name.split(".")[0] for name in imports(MODULES["checkpoint.py"])} & {"asyncio", "time", "random"}


def test_errors_import_nothing_of_ours() -> None:
    assert not [name for name in imports(MODULES["errors.py"]) if name.startswith("relay")]


def test_names_say_what_a_module_does() -> None:
    vague = re.compile(r"(^|_)(utils?|common|managers?|helpers?|misc|base|core|stuff)$")
    for module in MODULES:
        for part in Path(module).with_suffix("").parts:
            assert not vague.search(part), module


def test_every_module_says_what_it_is_for() -> None:
    silent = [module for module, tree in MODULES.items() if not ast.get_docstring(tree)]
    assert silent == []


PUBLIC = [
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.RelayError) and not name.startswith("_")
]


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("name", PUBLIC)
def test_every_error_has_a_heading_in_the_runbook(name: str) -> None:
    runbook = ROOT / "docs" / "operations.md"
    assert runbook.exists(), "docs/operations.md is missing: it has a heading for every class of errors.py"
    headings = re.findall(r"^#+ +(.*?) *$", runbook.read_text(), re.MULTILINE)
    assert name in [heading.strip("`") for heading in headings]


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    tree = errors.__doc__ or ""
    assert [name for name in PUBLIC if not re.search(rf"\b{name}\b", tree)] == []
