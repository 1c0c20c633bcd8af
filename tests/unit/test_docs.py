"""The documents name nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "leadline"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NUMBER = r"(?:Appendix )?(?:\d+(?:\.\d+)?|A)\b"
CITED = re.compile(rf"architecture\.md,? (?:sections? )?({NUMBER}(?:(?:, | and | to ){NUMBER})*)")
# Files and folders as documents write them: `engine/sampler.py`, `leadline/cache/`, `docs/log.md`, `hyper.py`.
PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|json|toml))?|\w+\.py)`")
# Folders and files that come to be when the program runs, and names of the published repository.
NOT_OURS = ("inference/", "encoding/", ".venv/", "owner/")


def test_the_lock_is_installable_anywhere() -> None:
    """Plain `name==version` lines: a build tag such as +cpu exists on some indexes only."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 50
    assert [line for line in lines if not re.fullmatch(r"[\w-]+==[\d.]+(?:post\d+)?", line)] == []


def cited_sections() -> dict[str, list[str]]:
    """Section numbers by where code and tests cite them; ranges by both ends."""
    cited: dict[str, list[str]] = {}
    for file in [*PACKAGE.rglob("*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]:
        for match in CITED.finditer(" ".join(file.read_text(encoding="utf-8").split())):
            for number in re.findall(NUMBER, match[1]):
                cited.setdefault(number, []).append(str(file.relative_to(ROOT)))
    return cited


def test_every_cited_section_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^##+ (?:Appendix )?(\d+(?:\.\d+)?|A)\b", text, re.MULTILINE))
    cited = cited_sections()
    assert len(cited) > 30
    missing = {number: files for number, files in cited.items() if number.removeprefix("Appendix ") not in sections}
    assert missing == {}


def test_sections_are_in_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    numbers = [tuple(map(int, n.split("."))) for n in re.findall(r"^##+ (\d+(?:\.\d+)?)\b", text, re.MULTILINE)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_in_a_document_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    paths = {path for path in PATH.findall(text) if not path.startswith(NOT_OURS)}
    names = {file.name for folder in ("leadline", "tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")}
    known = [
        path in names or any((base / path).exists() for base in (ROOT, PACKAGE, PACKAGE / "ops")) for path in paths
    ]
    assert [path for path, is_known in zip(paths, known, strict=True) if not is_known] == []
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert {link for link in links if link and not (document.parent / link).exists()} == set()


def test_the_structure_names_every_package() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    packages = {folder.parent.relative_to(PACKAGE).parts[0] for folder in PACKAGE.glob("*/__init__.py")}
    named = set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))
    assert named == packages | {"leadline"}
