"""The tree in the README, made from the source: `python tests/rules/readme_tree.py` writes it."""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tracefp4"
README = ROOT / "README.md"
SLOT = re.compile(r"(?<=<!-- tree:begin -->\n).*?(?=<!-- tree:end -->)", flags=re.S)
# from the top of the import order to its bottom
ROOMS = (
    "cli", "bench", "study", "rl", "rollout", "checkpoints", "patching", "qat", "models", "kvcache", "diagnostics",
    "guidance", "ops", "formats", "store", "coding",
)  # fmt: skip
WIDTH = 110
INDENT = 15


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, up to its colon where the whole is too long."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    sentence = re.split(r"\.(?: |$)", text)[0]
    return sentence if len(sentence) <= WIDTH - INDENT else sentence.partition(":")[0]


def _members(room: str) -> list[str]:
    folder = SOURCE / room
    names = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
    names += [f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()]
    return sorted(names)


def tree() -> str:
    """Return the fenced tree: one line per room with its purpose, and its modules below."""
    lines = ["```", "src/tracefp4/"]
    for room in ROOMS:
        lines.append(f"  {room + '/':{INDENT - 2}}{first_sentence(SOURCE / room / '__init__.py')}")
        lines += textwrap.wrap(
            " ".join(_members(room)), WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
        )
    lines.append(f"  {'errors.py':{INDENT - 2}}{first_sentence(SOURCE / 'errors.py')}")
    return "\n".join([*lines, "```", ""])


def rooms_in_source() -> set[str]:
    """Return the names of the packages directly below the source root."""
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def write() -> None:
    """Put the tree between its markers in the README."""
    text = README.read_text(encoding="utf-8")
    README.write_text(SLOT.sub(lambda _: tree(), text), encoding="utf-8")


if __name__ == "__main__":
    write()
