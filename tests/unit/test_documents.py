"""The documents keep their word: links lead somewhere, promises have tests, examples work, no machine shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay import errors
from relay.config import load

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for top in ROOT.iterdir()
    if not top.name.startswith(".")
    for path in (top.rglob("*.md") if top.is_dir() else [top])
    if path.suffix == ".md"
)
GUARANTEES = [f"G{number}" for number in range(1, 12)]
NOT_BUILT = {"G9"}
"""Promises that this version does not keep yet; docs/guarantees.md says so under each. Tests may carry them already."""

_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r'guarantee\("(G\d+)"\)')


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    page = _FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> Iterator[tuple[Path, str]]:
    for target in _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8"))):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield (path.parent / file).resolve() if file else path, anchor


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\b.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading}"
    return found[0]


def marked() -> dict[str, set[str]]:
    """Guarantee → names of the tests that carry its mark; a mark of a whole module counts for all its tests."""
    found: dict[str, set[str]] = {each: set() for each in GUARANTEES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for whole in re.findall(r"^pytestmark = .*$", source, re.MULTILINE):
            for each in _MARK.findall(whole):
                found[each] |= set(re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE))
        for decorators, test in re.findall(
            r"((?:^@.*\n(?:^[ )\]].*\n)*)+)^(?:async )?def (test_\w+)", source, re.MULTILINE
        ):
            for each in _MARK.findall(decorators):
                found[each].add(test)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for file, anchor in links(path):
        assert file.exists(), f"{name(path)} → {file}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name(path)} → {name(file)}#{anchor}"


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_every_guarantee_has_a_heading_and_a_test(guarantee: str) -> None:
    passage = section(text("docs/guarantees.md"), guarantee)
    if guarantee in NOT_BUILT:
        assert "Not built yet" in passage
    else:
        assert "**Promise.**" in passage
        assert marked()[guarantee], f'no test carries @pytest.mark.guarantee("{guarantee}")'


def test_marks_are_of_promises_that_exist() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert set(_MARK.findall(path.read_text(encoding="utf-8"))) <= set(GUARANTEES), name(path)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_the_tests_that_a_guarantee_names_exist_and_carry_its_mark(guarantee: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", section(text("docs/guarantees.md"), guarantee)))
    assert named <= marked()[guarantee]


def test_every_error_class_has_a_heading_in_the_runbook() -> None:
    headings = set(re.findall(r"^##+ (\w+)$", text("docs/operations.md"), re.MULTILINE))
    classes = {
        each for each, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RelayError)
    }
    assert classes - headings == set()


def test_the_map_shows_files_that_exist() -> None:
    section_of_map = section(text("docs/architecture.md"), "Map")
    for path in re.findall(r"`((?:relay|sql|deploy|tests)/[\w./]*)`", section_of_map):
        assert (ROOT / path).exists(), path


def test_every_file_is_in_the_map() -> None:
    section_of_map = section(text("docs/architecture.md"), "Map")
    for path in sorted((ROOT / "relay").glob("*.py")) + sorted((ROOT / "relay/sink").glob("*.py")):
        if not path.name.startswith("__"):
            assert f"{path.name}`" in section_of_map, path


def test_decisions_are_numbered_without_gaps_and_listed() -> None:
    decisions = sorted(path.name for path in (ROOT / "docs/adr").glob("[0-9]*.md"))
    assert [each[:4] for each in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    for each in decisions:
        page = text(f"docs/adr/{each}")
        assert page.startswith(f"# {each[:4]} ")
        assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["Context", "Decision", "Consequences"]
        assert f"({each})" in text("docs/adr/README.md")


def test_the_readme_is_short_and_its_configuration_loads(tmp_path: Path) -> None:
    readme = text("README.md")
    assert len(readme.splitlines()) <= 120
    examples = re.findall(r"^```toml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        file = tmp_path / "relay.toml"
        file.write_text(example, encoding="utf-8")
        assert load(file, {}).sink.jetstream.streams[0].subjects == ("events.>",)


def test_commands_that_documents_show_exist() -> None:
    known = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    for path in DOCUMENTS:
        assert set(re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(encoding="utf-8"), re.MULTILINE)) <= known, name(
            path
        )


def test_nothing_is_of_one_machine() -> None:
    foreign = re.compile(
        r"(?<![\w.~])/(?:tmp|work|root|home/\w+)/"
        r"|\b[\w.-]*(?:pypi|pythonhosted|npmjs|maven|artifactory|nexus|registry)[\w-]*\.(?:org|com|io|net|dev|internal)\b"
    )
    files = [*DOCUMENTS, *ROOT.glob("*.toml"), ROOT / "Makefile", ROOT / "requirements-dev.txt"]
    for path in files:
        if path.name == "relay.toml":
            continue  # a user's own; not tracked
        found = foreign.search(path.read_text(encoding="utf-8"))
        assert not found, f"{name(path)}: {found and found[0]}"
